// Rows of w, dequantized: y[r] = scale * (scales*q + biases)[ids[r]].
// The stream keeps 16 rows together, so a row is one dword out of every 64 bytes.
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

static const float kFp4Shifted[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// s eeee mmm, as in qmv/fp8.cpp
static float e4m3(int code) {
  if ((code & 127) == 127) return __builtin_nanf("");
  const uint32_t bits = (uint32_t)(code & 128) << 24 | (uint32_t)(code & 127) << 20;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value * 0x1p120f;
}

static float scalar(const void* p, Type t) {
  alignas(64) float lanes[16];
  store(lanes, load_first(p, t, 1));
  return lanes[0];
}

void embedding(const Matrix& w, const void* ids, bool wide_ids, void* y, Type type, float scale,
               int row0, int row1) {
  const int per_dword = 32 / w.bits, mask = (1 << w.bits) - 1;
  for (int r = row0; r < row1; r++) {
    long long id = wide_ids ? ((const long long*)ids)[r] : ((const int*)ids)[r];
    if (id < 0) id += w.n;
    const bool inside = id >= 0 && id < w.n;  // outside: NaN, never a read outside the matrix
    const int row = inside ? (int)id : 0;
    const uint8_t* p = w.data + row / kLanes * w.block_bytes();
    const int lane = row % kLanes;
    alignas(64) float out[128];
    for (int g = 0; g < w.k / w.group; g++, p += w.group_bytes()) {
      const void* scales = p + w.codes_bytes();
      const float s = scalar(at(scales, w.scales, lane), w.scales);
      const float b = scalar(at(scales, w.scales, kLanes + lane), w.scales);
      for (int i = 0; i < w.group / per_dword; i++) {
        uint32_t dword;
        __builtin_memcpy(&dword, p + (i * kLanes + lane) * 4, 4);
        for (int j = 0; j < per_dword; j++, dword >>= w.bits) {
          const int code = dword & mask;
          const float q = w.fp4 ? kFp4Shifted[code] : w.fp8 ? e4m3(code) : (float)code;
          out[i * per_dword + j] = inside ? (s * q + b) * scale : __builtin_nanf("");
        }
      }
      for (int i = 0; i < w.group; i += 16)
        store(at(y, type, (size_t)r * w.k + (size_t)g * w.group + i), type, load(out + i));
    }
  }
}

}  // namespace qrun::QRUN_NS
