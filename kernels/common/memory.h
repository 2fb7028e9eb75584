// Memory of results, scratch and weights: begins with a cache line, is used again, has large pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mlx/mlx.h"

namespace qrun {

constexpr size_t kLine = 64;  // a register or a tile's row that spans two lines costs twice

// At least `bytes` of memory, with whatever was in it. Whoever holds it last gives it back.
mlx::core::allocator::Data block(size_t bytes);

// Memory for an array that stays (packed weights): side by side with others in large pages.
void settle(mlx::core::array& out);

// Bytes from p to the next cache line.
inline size_t to_line(const void* p) { return -reinterpret_cast<uintptr_t>(p) & (kLine - 1); }

}  // namespace qrun
