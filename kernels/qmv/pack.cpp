// MLX's rows -> the stream: 16 rows side by side, a group of codes, then its scales and biases.
// Several matrices below each other (experts) begin a block each.
// The drawing is in README.md. 2- and 3-bit codes are widened to 4 bits, 5 and 6 to 8: the numbers
// they stand for stay the same.
#include <cmath>
#include <cstring>

#include "../common/op.h"
#include "../common/pool.h"

namespace qrun {
namespace {

struct Source {
  const uint32_t* w;  // (n, k*bits/32)
  const char* scales;
  const char* biases;  // null where scales are bytes
  int bits;
};

// Codes i .. i + 32/wide of a row, widened into one dword.
inline uint32_t widened(const uint32_t* row, int i, int bits, int wide) {
  const int per_dword = 32 / wide;
  uint32_t out = 0;
  for (int j = 0; j < per_dword; j++) {
    const int at = (i + j) * bits, word = at / 32, shift = at % 32;
    uint64_t two = row[word];
    if (shift + bits > 32) two |= static_cast<uint64_t>(row[word + 1]) << 32;
    out |= static_cast<uint32_t>(two >> shift & ((1u << bits) - 1)) << (j * wide);
  }
  return out;
}

// A microscaling format's byte: e4m3 (nvfp4, kept in f16) or a power of two (kept in bf16).
float byte_scale(uint8_t byte, Type kept) {
  if (kept == Type::bf16) return byte == 255 ? NAN : std::ldexp(1.0f, byte - 127);
  if ((byte & 127) == 127) return NAN;
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10)
                              : std::ldexp(static_cast<float>(mantissa), -9);
  return byte & 128 ? -size : size;
}

// Whether any e4m3 code is NaN: then so is every sum of its group.
bool holds_nan(const uint32_t* codes, int dwords) {
  for (int i = 0; i < dwords * 4; i++)
    if ((codes[i / 4] >> i % 4 * 8 & 127) == 127) return true;
  return false;
}

void put(uint8_t* to, Type type, float value) {
  if (type == Type::f16) {
    const mx::float16_t half = value;
    std::memcpy(to, &half, 2);
  } else {
    const mx::bfloat16_t half = value;
    std::memcpy(to, &half, 2);
  }
}

void pack_block(const Matrix& m, const Source& s, uint8_t* out, int block) {
  const int first_row = block / m.blocks() * m.n + block % m.blocks() * kLanes;
  const int lanes = std::min(kLanes, m.n - block % m.blocks() * kLanes), groups = m.k / m.group;
  const int dwords = m.group * m.bits / 32, item = static_cast<int>(size_of(m.scales));
  const size_t words = static_cast<size_t>(m.k) * s.bits / 32;
  uint8_t* p = out + block * m.block_bytes();
  const uint32_t* first = s.w + first_row * words;
  const bool plain = lanes == kLanes && s.bits == m.bits;
  if (lanes < kLanes) std::memset(p, 0, m.block_bytes());
  if (plain)  // written line by line: 16 streams are read, one is written
    for (int g = 0; g < groups; g++) {
      uint32_t* codes = reinterpret_cast<uint32_t*>(p + g * m.group_bytes());
      for (int i = 0; i < dwords; i++)
        for (int lane = 0; lane < kLanes; lane++) *codes++ = first[lane * words + g * dwords + i];
    }
  for (int lane = 0; lane < lanes; lane++) {
    const size_t row = first_row + lane;
    const uint32_t* w = first + lane * words;
    for (int g = 0; g < groups; g++) {
      uint8_t* q = p + g * m.group_bytes();
      uint32_t* codes = reinterpret_cast<uint32_t*>(q) + lane;
      if (!plain)
        for (int i = 0; i < dwords; i++)
          codes[i * kLanes] = s.bits == m.bits
                                  ? w[g * dwords + i]
                                  : widened(w, g * m.group + i * 32 / m.bits, s.bits, m.bits);
      uint8_t* scales = q + m.codes_bytes() + lane * item;
      if (!s.biases) {
        // fp4: value = scale/2 * (code number) - 6*scale
        float scale = byte_scale(static_cast<uint8_t>(s.scales[row * groups + g]), m.scales);
        if (m.fp8 && holds_nan(w + static_cast<size_t>(g) * dwords, dwords)) scale = NAN;
        put(scales, m.scales, m.fp4 ? scale / 2 : scale);
        put(scales + kLanes * item, m.scales, m.fp4 ? scale * -6 : 0);
      } else {
        std::memcpy(scales, s.scales + (row * groups + g) * item, item);
        std::memcpy(scales + kLanes * item, s.biases + (row * groups + g) * item, item);
      }
    }
  }
}

class Pack : public CpuPrimitive {
 public:
  Pack(mx::Stream s, Matrix m, int bits, int count)
      : CpuPrimitive(s), m_(m), bits_(bits), count_(count) {}
  const char* name() const override { return "qrun_pack"; }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    Source s{reinterpret_cast<const uint32_t*>(dense(in[0], stream())), dense(in[1], stream()),
             in.size() > 2 ? dense(in[2], stream()) : nullptr, bits_};
    settle(out[0]);
    enqueue(stream(), [m = m_, s, blocks = m_.blocks() * count_, to = out[0].data<uint8_t>()] {
      parallel(blocks, std::max(1, blocks / (8 * threads())), [&](int b0, int b1) {
        for (int b = b0; b < b1; b++) pack_block(m, s, to, b);
      });
    });
  }

 private:
  Matrix m_;
  int bits_, count_;
};

}  // namespace

Matrix format_of(const std::string& op, int n, int k, int bits, int group, Type scales,
                 const std::string& mode) {
  const std::string at = op + ": ", what = std::to_string(bits) + " bits in mode " + mode;
  const bool affine = mode == "affine", fp4 = mode == "mxfp4" || mode == "nvfp4";
  const bool fp8 = mode == "mxfp8";
  require(affine || fp4 || fp8, at + "mode \"" + mode + "\" has no CPU kernel");
  require(affine ? bits >= 2 && bits <= 8 && bits != 7 : bits == (fp8 ? 8 : 4),
          at + what + " have no CPU kernel");
  if (affine)
    require(group == 32 || group == 64 || group == 128,
            at + "group_size must be 32, 64 or 128, not " + std::to_string(group));
  else
    require(group == (mode == "nvfp4" ? 16 : 32),
            at + "group_size of " + mode + " cannot be " + std::to_string(group));
  // Both numbers that a microscaling format's byte becomes are exact in these types.
  const Type type = affine ? scales : mode == "nvfp4" ? Type::f16 : Type::bf16;
  return {nullptr, n, k, bits <= 4 ? 4 : 8, group, type, fp4, fp8};
}

mx::array pack(const mx::array& w, const mx::array& scales, const std::optional<mx::array>& biases,
               int bits, int group, const std::string& mode, int count) {
  const bool affine = mode == "affine";
  const Type type = affine ? type_of(scales.dtype(), "pack", "scales") : Type::f32;
  Matrix m = format_of("pack", 1, group, bits, group, type, mode);
  require(w.ndim() == 2 && w.dtype() == mx::uint32, "pack: w must be uint32 (n, k*bits/32)");
  const int rows = w.shape(0), n = rows / std::max(count, 1);
  require(count >= 1 && n * count == rows,
          "pack: " + std::to_string(rows) + " rows are no " + std::to_string(count) + " matrices");
  const int64_t row_bits = static_cast<int64_t>(w.shape(1)) * 32;
  require(n >= 1 && row_bits % bits == 0 && row_bits / bits % group == 0,
          "pack: w has shape " + text(w.shape()) + ", which is no whole number of groups of " +
              std::to_string(group) + " at " + std::to_string(bits) + " bits");
  const int k = static_cast<int>(row_bits / bits);
  require_shape("pack", "scales", scales, {rows, k / group});
  require(biases.has_value() == affine,
          affine ? "pack: affine matrices need biases" : "pack: " + mode + " has no biases");
  std::vector<mx::array> inputs{w, scales};
  if (biases) {
    require_shape("pack", "biases", *biases, {rows, k / group});
    require(biases->dtype() == scales.dtype(), "pack: scales and biases must have one dtype");
    inputs.push_back(*biases);
  }
  require(affine || scales.dtype() == mx::uint8, "pack: " + mode + " scales must be uint8");
  m.n = n;
  m.k = k;
  const size_t bytes = m.block_bytes() * m.blocks() * count;
  require(bytes < (size_t{1} << 31),
          "pack: the matrix needs " + std::to_string(bytes) + " bytes, MLX's axes end at 2^31");
  return mx::array({static_cast<int>(bytes)}, mx::uint8,
                   std::make_shared<Pack>(cpu_stream(), m, bits, count), std::move(inputs));
}

}  // namespace qrun
