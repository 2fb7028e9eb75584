// The runtime's calls as single AMD instructions, for registers.py; never run.
#pragma once
#define em_argument(i) em_args[i]
#define EM_ONE __attribute__((always_inline, nodebug)) inline
EM_ONE uint em_workitem() { return __builtin_amdgcn_workitem_id_x(); }
EM_ONE uint em_attribute(uint what, uint d) {
  uint group = d == 0 ? __builtin_amdgcn_workgroup_id_x()
               : d == 1 ? __builtin_amdgcn_workgroup_id_y() : __builtin_amdgcn_workgroup_id_z();
  switch (what) {
    case 0: return group * 32 + em_workitem();
    case 1: case 7: return em_workitem();
    case 2: return group;
    case 8: return __builtin_amdgcn_readfirstlane(em_workitem() / 32);
    case 9: return em_workitem() % 32;
    case 13: return em_workitem() / 4;
    case 14: return em_workitem() % 4;
    default: return 32;
  }
}
EM_ONE threadgroup void* em_threadgroup_array(uint id, ulong) { return (threadgroup void*)((id + 1) << 12); }
EM_ONE void em_threadgroup_barrier(uint, em_file_t, uint) { __builtin_amdgcn_s_barrier(); }
EM_ONE void em_simdgroup_barrier(uint, em_file_t, uint) { __builtin_amdgcn_wave_barrier(); }
EM_ONE ulong em_shuffle(uint, ulong value, uint from, em_file_t, uint) {
  return (uint)__builtin_amdgcn_ds_bpermute(from * 4, (uint)value);
}
EM_ONE ulong em_ballot(uint, uint yes, em_file_t, uint) { return __builtin_amdgcn_ballot_w32(yes); }
EM_ONE float em_reduce_float(uint, float x, uint, uint, em_file_t, uint) {
  __asm__ volatile("; reduce %0" : "+v"(x));
  return x;
}
EM_ONE long em_reduce_long(uint, long x, uint, uint, em_file_t, uint) {
  int y = x;
  __asm__ volatile("; reduce %0" : "+v"(y));
  return y;
}
EM_ONE ulong em_reduce_ulong(uint, ulong x, uint, uint, em_file_t, uint) {
  uint y = x;
  __asm__ volatile("; reduce %0" : "+v"(y));
  return y;
}
EM_ONE ulong em_multiply(ulong a, ulong b, ulong c, em_file_t, uint) {
  uint x = (uint)c, y = (uint)(c >> 32);
  __asm__ volatile("; multiply %0 %1 %2 %3 %4 %5"
                   : "+v"(x), "+v"(y)
                   : "v"((uint)a), "v"((uint)(a >> 32)), "v"((uint)b), "v"((uint)(b >> 32)));
  return (ulong)y << 32 | x;
}
EM_ONE void em_pass(uint, em_file_t, uint) {}
EM_ONE void em_atomic(volatile device void*, uint, uint) {}
