// Memory of results, scratch and weights (a task's own is lease.h): begins with a cache line, is
// used again, has large pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mlx/mlx.h"

namespace qrun {

constexpr size_t kLine = 64;  // a register or a tile's row that spans two lines costs twice

// Bytes from p to the next cache line.
inline size_t to_line(const void* p) { return -reinterpret_cast<uintptr_t>(p) & (kLine - 1); }
inline size_t in_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// At least `bytes` of memory, with whatever was in it. Whoever holds it last gives it back.
mlx::core::allocator::Data block(size_t bytes);

// The pages of what was freed go back to the system.
void trim();

// Memory for an array that stays (packed weights): side by side with others in large pages.
void settle(mlx::core::array& out);

// Zeros straight from the system, whose pages come when they are first written. The data begins
// behind the word in which MLX keeps the size of its own.
mlx::core::array mapped(size_t bytes);

// Arrays of zeros side by side in large pages, for what ops write in place: the cache.
std::vector<mlx::core::array> blank(const std::vector<mlx::core::Shape>& shapes,
                                    mlx::core::Dtype dtype);

}  // namespace qrun
