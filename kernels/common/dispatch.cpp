// Which instruction set runs: the best one that both the processor and the system support, or the
// one that QRUN_ISA names.
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "types.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qrun {

#define QRUN_DECLARE(isa)     \
  namespace isa {             \
  extern const Kernels table; \
  }
QRUN_DECLARE(portable)
#if defined(__x86_64__)
QRUN_DECLARE(avx2)
QRUN_DECLARE(avx512)
QRUN_DECLARE(avx512vnni)
QRUN_DECLARE(amx)
#elif defined(__aarch64__)
QRUN_DECLARE(neon)
#endif
#undef QRUN_DECLARE

namespace {

struct Choice {
  const Kernels* kernels;
  bool supported;
};

#if defined(__x86_64__)
// The register state that the system saves on a context switch (XCR0): without its bits an AVX
// instruction faults, whatever cpuid says.
unsigned long long saved_state() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low | (unsigned long long)high << 32;
}

// Linux hands out the 8 KB of tile registers on request, to the whole process at once.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// Best last.
const Choice* choices(int& count) {
  static const auto list = [] {
    const unsigned long long state = saved_state();
    unsigned a, b, c = 0, d, b7 = 0, c7 = 0, d7 = 0, a71 = 0;
    __get_cpuid(1, &a, &b, &c, &d);
    const unsigned features1 = c;
    __get_cpuid_count(7, 0, &a, &b7, &c7, &d7);
    __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    const bool ymm = (state & 0x06) == 0x06, zmm = ymm && (state & 0xe0) == 0xe0;
    const bool avx2 = ymm && (b7 & bit_AVX2) && (features1 & bit_FMA) && (features1 & bit_F16C);
    const bool avx512 = avx2 && zmm && (b7 & bit_AVX512F) && (b7 & bit_AVX512BW) &&
                        (b7 & bit_AVX512VL) && (b7 & bit_AVX512DQ);
    const bool vnni = avx512 && (c7 & bit_AVX512VNNI);
    constexpr unsigned amx_tile = 1u << 24, amx_int8 = 1u << 25, amx_bf16 = 1u << 22,
                       gfni = 1u << 8;
    constexpr unsigned avx512_bf16 = 1u << 5;
    const bool amx = vnni && (a71 & avx512_bf16) && (c7 & gfni) && (d7 & amx_tile) &&
                     (d7 & amx_int8) && (d7 & amx_bf16) && (state & 0x60000) == 0x60000 &&
                     tiles_granted();
    struct List {
      Choice at[5];
    };
    return List{{{&portable::table, true},
                 {&avx2::table, avx2},
                 {&avx512::table, avx512},
                 {&avx512vnni::table, vnni},
                 {&amx::table, amx}}};
  }();
  count = 5;
  return list.at;
}
#elif defined(__aarch64__)
// Byte dot products came with ARMv8.2; every Apple processor that runs MLX has them.
bool has_dot() {
#if defined(__linux__)
  constexpr unsigned long asimd_dp = 1ul << 20;
  return getauxval(AT_HWCAP) & asimd_dp;
#else
  return true;
#endif
}

const Choice* choices(int& count) {
  static const Choice list[] = {{&portable::table, true}, {&neon::table, has_dot()}};
  count = 2;
  return list;
}
#else
const Choice* choices(int& count) {
  static const Choice list[] = {{&portable::table, true}};
  count = 1;
  return list;
}
#endif

const Kernels* find(const char* name) {
  int count;
  const Choice* list = choices(count);
  std::string known;
  for (int i = 0; i < count; i++) {
    known += (i ? ", " : "") + std::string(list[i].kernels->name);
    if (std::string(list[i].kernels->name) == name) {
      if (list[i].supported) return list[i].kernels;
      throw std::invalid_argument("instruction set \"" + std::string(name) +
                                  "\" (QRUN_ISA): this processor or system does not support it");
    }
  }
  throw std::invalid_argument("instruction set \"" + std::string(name) +
                              "\" (QRUN_ISA): unknown; known here: " + known);
}

const Kernels* best() {
  if (const char* name = std::getenv("QRUN_ISA"); name && *name) return find(name);
  int count;
  const Choice* list = choices(count);
  while (!list[count - 1].supported) count--;
  return list[count - 1].kernels;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_acquire);
  if (!k) chosen.store(k = best(), std::memory_order_release);
  return *k;
}

void force_isa(const char* name) { chosen.store(find(name), std::memory_order_release); }

}  // namespace qrun
