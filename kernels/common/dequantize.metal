// Packed weights: what a word means. A Scheme is the one place that knows; the matrix-vector
// kernel, the tile loader and the embedding ask it for
//
//   PACK             fewest weights that fill whole 32-bit words (bits 3: 32 weights, 3 words)
//   words(k)         word index of weight k of a row, k a multiple of PACK
//   group(row, k)    scale and bias of the group which weight k lies in
//   code(w, i)       weight i of a run of words as an exact float, times 2^shift(i)
//   shift(i)         how far weight i was left from the bottom of its word
//
// so that  weight = scale * code * 2^-shift + bias,  evaluated in float32.

#include "memory.metal"

// Scale and bias of one group; formats without a bias have bias 0.
struct Group {
  float scale;
  float bias;
};

constexpr int pack_size(int bits) {
  return bits == 2 ? 16 : bits == 4 ? 8 : bits == 6 ? 16 : bits == 8 ? 4 : 32;
}

// Weight i of a run, where it lies in its word: bits are masked, not shifted down, because a
// power of two can be taken out of x once for all rows. Only a weight that straddles two words
// (bits 3, 5, 6) is moved to the bottom.
//
//   bits 4, one word    31 ........ 12 11 .. 8 7 .. 4 3 .. 0
//                                      w2      w1     w0         code(w, 1) = w & 0xf0 = 16 w1
template <int BITS, int WORDS>
METAL_FUNC uint masked_bits(thread const uint (&w)[WORDS], int i) {
  const int bit = i * BITS;
  const int word = bit / 32;
  const int low = bit % 32;
  const uint mask = (1u << BITS) - 1;
  if (low + BITS > 32) {
    return ((w[word] >> low) | (w[word + 1] << (32 - low))) & mask;
  }
  return w[word] & (mask << low);
}

template <int BITS>
constexpr int masked_shift(int i) {
  return (i * BITS) % 32 + BITS > 32 ? 0 : (i * BITS) % 32;
}

// 2^-shift: exact, since a shift is at most 30.
constexpr float undo(int shift) { return 1.0f / float(1u << shift); }

// Weight i of a run of words.
template <typename Scheme, int WORDS>
METAL_FUNC float weight(thread const uint (&run)[WORDS], int i, Group group) {
  return group.scale * (Scheme::code(run, i) * undo(Scheme::shift(i))) + group.bias;
}

// MLX's affine format: weight = scale * q + bias, little-endian bit stream per row.
template <typename S, int BITS_, int GROUP_>
struct Affine {
  CONST BITS = BITS_;
  CONST GROUP = GROUP_;
  CONST PACK = pack_size(BITS_);

  const device uint* w;    // (N, K * BITS / 32)
  const device S* scales;  // (N, K / GROUP)
  const device S* biases;  // (N, K / GROUP)
  int K;                   // weights in a row, a multiple of GROUP

  METAL_FUNC const device uint* words(int row, int k) const thread {
    return w + (size_t(row) * (K / PACK) + k / PACK) * (PACK * BITS / 32);
  }
  METAL_FUNC Group group(int row, int k) const thread {
    const size_t at = size_t(row) * (K / GROUP) + k / GROUP;
    return {float(scales[at]), float(biases[at])};
  }
  template <int WORDS>
  METAL_FUNC static float code(thread const uint (&run)[WORDS], int i) {
    return float(masked_bits<BITS_>(run, i));
  }
  static constexpr int shift(int i) { return masked_shift<BITS_>(i); }
};

// The microscaling formats: small floats, and a power of two (nvfp4: a small float) a group.
enum { MXFP4 = 0, NVFP4 = 1, MXFP8 = 2 };

// 1 sign, 2 exponent, 1 fraction bits: moved into a half they are the value over 2^14.
METAL_FUNC float e2m1(uint q) {
  const half magnitude = as_type<half>(ushort((q & 7) << 9)) * half(16384);
  return float(q & 8 ? -magnitude : magnitude);
}

// 1 sign, 4 exponent, 3 fraction bits: moved into a half they are the value over 2^8.
METAL_FUNC float e4m3(uint q) {
  const half magnitude = as_type<half>(ushort((q & 127) << 7)) * half(256);
  return float(q & 128 ? -magnitude : magnitude);
}

// 8 exponent bits: the exponent of a float, whose lowest one is a subnormal.
METAL_FUNC float e8m0(uint q) { return as_type<float>(q == 0 ? 0x400000u : q << 23); }

template <int FORMAT>
struct Micro {
  CONST BITS = FORMAT == MXFP8 ? 8 : 4;
  CONST GROUP = FORMAT == NVFP4 ? 16 : 32;
  CONST PACK = pack_size(FORMAT == MXFP8 ? 8 : 4);

  const device uint* w;        // (N, K * BITS / 32)
  const device uchar* scales;  // (N, K / GROUP)
  int K;                       // weights in a row, a multiple of GROUP

  METAL_FUNC const device uint* words(int row, int k) const thread {
    return w + (size_t(row) * (K / PACK) + k / PACK) * (PACK * BITS / 32);
  }
  METAL_FUNC Group group(int row, int k) const thread {
    const uint scale = scales[size_t(row) * (K / GROUP) + k / GROUP];
    return {FORMAT == NVFP4 ? e4m3(scale) : e8m0(scale), 0};
  }
  template <int WORDS>
  METAL_FUNC static float code(thread const uint (&run)[WORDS], int i) {
    const uint q = run[i / PACK] >> (i % PACK * BITS);
    return FORMAT == MXFP8 ? e4m3(q & 255) : e2m1(q & 15);
  }
  static constexpr int shift(int) { return 0; }
};
