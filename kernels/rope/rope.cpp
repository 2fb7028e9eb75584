// Heads out of the fused projection, normalized if asked, rotated, and k and v put into the cache.
// One item is one token: its row of qkv is (heads + 2*kv_heads, head_dim).
//
// Half-split pairs: (x[i], x[i + R/2]) turns by the angle of table row offset + l, column i;
// dimensions R and above pass through.
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

constexpr int kMaxHead = 512;

// in: D numbers of `type`; out: D numbers of `out_type`; cs: (R/2, 2) of cos, sin, or null.
static void head(const Rope& a, const void* in, void* out, Type out_type, const void* norm,
                 const float* cs) {
  const int d = a.head_dim, half = a.rotated / 2;
  alignas(64) float x[kMaxHead + 16], y[kMaxHead + 16];
  f32x16 squares = splat(0);
  for (int i = 0; i < d; i += 16) {
    f32x16 v = load_first(at(in, a.type, i), a.type, d - i);
    squares = fma(v, v, squares);
    store(x + i, v);
  }
  if (norm) {
    const f32x16 r = splat(1.0f / __builtin_sqrtf(sum(squares) / d + a.eps));
    for (int i = 0; i < d; i += 16)
      store(x + i, load(x + i) * r * load_first(at(norm, a.norm_type, i), a.norm_type, d - i));
  }
  if (cs) {
    int i = 0;
    for (; i + 16 <= half; i += 16) {
      f32x16 c, s;
      unzip(load(cs + 2 * i), load(cs + 2 * i + 16), c, s);
      const f32x16 first = load(x + i), second = load(x + i + half);
      store(y + i, first * c - second * s);
      store(y + i + half, second * c + first * s);
    }
    for (; i < half; i++) {
      const float c = cs[2 * i], s = cs[2 * i + 1];
      y[i] = x[i] * c - x[i + half] * s;
      y[i + half] = x[i + half] * c + x[i] * s;
    }
    for (i = a.rotated; i < d; i++) y[i] = x[i];
  }
  const float* result = cs ? y : x;
  for (int i = 0; i < d; i += 16)
    store_first(at(out, out_type, i), out_type, load(result + i), d - i);
}

void rope(const Rope& a, int item0, int item1) {
  const int H = a.heads, KV = a.kv_heads, D = a.head_dim;
  for (int item = item0; item < item1; item++) {
    const int b = item / a.length, l = item % a.length, position = a.offset + l;
    const float* cs = a.table + (size_t)position * a.rotated;
    const size_t row = (size_t)item * (H + 2 * KV) * D;
    for (int h = 0; h < H; h++)
      head(a, at(a.qkv, a.type, row + h * D),
           at(a.q, a.type, (((size_t)b * H + h) * a.length + l) * D), a.type, a.q_norm, cs);
    for (int h = 0; h < KV; h++) {
      const size_t slot = (((size_t)b * KV + h) * a.capacity + position) * D;
      head(a, at(a.qkv, a.type, row + (size_t)(H + h) * D), at(a.k_cache, a.cache_type, slot),
           a.cache_type, a.k_norm, cs);
      head(a, at(a.qkv, a.type, row + (size_t)(H + KV + h) * D), at(a.v_cache, a.cache_type, slot),
           a.cache_type, nullptr, nullptr);
    }
  }
}

}  // namespace qrun::QRUN_NS
