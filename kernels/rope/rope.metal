// rope: takes the fused projection qkv (B, L, (H + 2 Hkv) * D) apart. Queries and keys are normed
// (optional, per head), the first R of their D dims rotated, and
//
//   q        (B, H, L, D)    written
//   k_cache  (B, Hkv, C, D)  keys appended at offset, in place
//   v_cache  (B, Hkv, C, D)  values appended at offset, in place
//
// One simdgroup a head of a token. Pair i is (i, i + R / 2) and turns by the angle whose cosine
// and sine are table[position][i]. Dims from R on are copied.
//
// The caches come in as inputs, so const is cast away; the caller orders readers after this
// kernel by making them depend on q.

#include <metal_simdgroup>

#include "../common/memory.metal"

// NORM: q_norm and k_norm (D) are there. D, R: head size and rotated part of it, R even.
template <typename T, typename W, int D, int R, bool NORM>
METAL_FUNC void rope(const device T* qkv, const device T* k_cache, const device T* v_cache,
                     const constant int* offset, const device float* table, const device W* q_norm,
                     const device W* k_norm, float eps, device T* q, int L, int H, int Hkv, int C,
                     uint head, uint l, uint b, uint lane) {
  const device T* from = qkv + ((size_t(b) * L + l) * (H + 2 * Hkv) + head) * D;
  const int position = offset[0] + l;
  const bool is_query = int(head) < H;
  const bool is_value = int(head) >= H + Hkv;

  device T* to;
  if (is_query) {
    to = q + ((size_t(b) * H + head) * L + l) * D;
  } else {
    device T* cache = (device T*)(is_value ? v_cache : k_cache);
    const int h = (head - H) % Hkv;
    to = cache + ((size_t(b) * Hkv + h) * C + position) * D;
  }
  if (is_value) {
    for (int i = lane; i < D; i += 32) {
      to[i] = from[i];
    }
    return;
  }

  const device W* weight = is_query ? q_norm : k_norm;
  float factor = 1;
  if (NORM) {
    float squares = 0;
    for (int i = lane; i < D; i += 32) {
      squares += float(from[i]) * float(from[i]);
    }
    factor = rsqrt(simd_sum(squares) / D + eps);
  }
  const device float2* turns = (const device float2*)table + size_t(position) * (R / 2);
  for (int i = lane; i < R / 2; i += 32) {
    const int j = i + R / 2;
    const float cosine = turns[i].x;
    const float sine = turns[i].y;
    const float a = float(from[i]) * factor * (NORM ? float(weight[i]) : 1.0f);
    const float c = float(from[j]) * factor * (NORM ? float(weight[j]) : 1.0f);
    to[i] = T(a * cosine - c * sine);
    to[j] = T(a * sine + c * cosine);
  }
  for (int i = R + lane; i < D; i += 32) {
    to[i] = T(float(from[i]) * factor * (NORM ? float(weight[i]) : 1.0f));
  }
}
