// Loader x BlockMMA x Epilogue: one tile of  y = left @ right  from the first fetch to the store.
//
// STAGES 1: one pair of tiles. Tiles s + 1 are on their way from device memory to registers while
// tiles s are multiplied; two barriers a step keep writers and readers of the pair apart.
//
//     fetch 0 | place 0 | fetch 1, multiply 0 | place 1 | fetch 2, multiply 1 | ...
//
// STAGES 2: two pairs. Placing and multiplying touch different pairs, so one barrier a step does.
//
//     fetch 0, place 0 | fetch 1, multiply 0, place 1 | fetch 2, multiply 1, place 2 | ...
//
//  (| is a barrier of the threadgroup)

#include "block_mma.metal"
#include "epilogue.metal"
#include "loader.metal"

template <int STAGES, typename Left, typename Right, typename Grid>
METAL_FUNC void multiply_tiles(thread Left& left, thread Right& right, thread Grid& grid, int steps,
                               threadgroup uint4* tiles) {
  using L = typename Left::Element;
  using R = typename Right::Element;
  constexpr int left_size = Left::BYTES / 16;
  constexpr int pair_size = left_size + Right::BYTES / 16;

  left.fetch();
  right.fetch();
  if (STAGES == 1) {
    threadgroup L* l = (threadgroup L*)tiles;
    threadgroup R* r = (threadgroup R*)(tiles + left_size);
    for (int s = 0; s < steps; s++) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read tiles s - 1
      left.place(l);
      right.place(r);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // all have placed tiles s
      if (s + 1 < steps) {
        left.next();
        right.next();
        left.fetch();
        right.fetch();
      }
      grid.march(l, r);
    }
  } else {
    left.place((threadgroup L*)tiles);
    right.place((threadgroup R*)(tiles + left_size));
    for (int s = 0; s < steps; s++) {
      // All have placed tiles s, and have read tiles s - 1, whose memory is written next.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      threadgroup uint4* now = tiles + s % 2 * pair_size;
      threadgroup uint4* then = tiles + (s + 1) % 2 * pair_size;
      if (s + 1 < steps) {
        left.next();
        right.next();
        left.fetch();
        right.fetch();
      }
      grid.march((threadgroup L*)now, (threadgroup R*)(now + left_size));
      if (s + 1 < steps) {
        left.place((threadgroup L*)then);
        right.place((threadgroup R*)(then + left_size));
      }
    }
  }
}
