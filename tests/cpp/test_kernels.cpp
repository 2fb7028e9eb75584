// The kernels and the pool without Python or MLX, for the sanitizers (tests/cpp/run). Every array
// is a heap block of exactly its size, so that the address sanitizer sees the first byte beyond.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <thread>
#include <vector>

#include "../../kernels/common/pool.h"
#include "../../kernels/common/types.h"

using namespace qrun;

namespace {

std::mt19937 rng(1);

void check(bool ok, const char* what, int a = 0, int b = 0, int c = 0) {
  if (ok) return;
  std::fprintf(stderr, "%s: %s (%d %d %d)\n", kernels().name, what, a, b, c);
  std::exit(1);
}

std::vector<float> normal(size_t n) {
  std::normal_distribution<float> d;
  std::vector<float> v(n);
  for (float& x : v) x = d(rng);
  return v;
}

enum Codes { whole, e2m1, e4m3 };

// What a code stands for before scale and bias.
float value(Codes codes, int code) {
  if (codes == whole) return code;
  const int sign_bit = codes == e2m1 ? 3 : 7, mantissa_bits = codes == e2m1 ? 1 : 3;
  const int exponent_bias = codes == e2m1 ? 1 : 7;
  const int rest = code & ((1 << sign_bit) - 1), exponent = rest >> mantissa_bits;
  const int mantissa = rest & ((1 << mantissa_bits) - 1);
  const int significand = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
  const double size =
      std::ldexp(significand, std::max(exponent, 1) - exponent_bias - mantissa_bits);
  const double number = code >> sign_bit ? -size : size;
  return codes == e2m1 ? 12 + 2 * number : number;  // as the stream shifts them
}

// A random stream, float32 scales, and the matrix it stands for.
struct Sample {
  Matrix m;
  std::vector<uint8_t> stream;
  std::vector<float> dense;  // (n, k)

  Sample(int n, int k, int bits, int group, Codes codes)
      : m{nullptr, n, k, bits, group, Type::f32, codes == e2m1, codes == e4m3} {
    stream.resize(m.block_bytes() * m.blocks());
    dense.resize((size_t)n * k);
    const std::vector<float> numbers = normal(2 * (size_t)m.blocks() * kLanes * k / group);
    size_t next = 0;
    for (int block = 0; block < m.blocks(); block++)
      for (int g = 0; g < k / group; g++) {
        uint8_t* p = stream.data() + block * m.block_bytes() + g * m.group_bytes();
        for (size_t i = 0; i < m.codes_bytes(); i++) {
          p[i] = (uint8_t)rng();
          if (codes == e4m3 && (p[i] & 127) == 127) p[i] = 0;  // NaN
        }
        float scales[2 * kLanes];
        for (float& s : scales) s = numbers[next++];
        std::memcpy(p + m.codes_bytes(), scales, sizeof scales);
        for (int lane = 0; lane < kLanes && block * kLanes + lane < n; lane++)
          for (int i = 0; i < group; i++) {
            const int bit = i * bits, dword = bit / 32;
            uint32_t word;
            std::memcpy(&word, p + (dword * kLanes + lane) * 4, 4);
            const int q = word >> bit % 32 & ((1 << bits) - 1);
            dense[(size_t)(block * kLanes + lane) * k + g * group + i] =
                scales[lane] * value(codes, q) + (codes == e4m3 ? 0 : scales[kLanes + lane]);
          }
      }
    m.data = stream.data();
  }
};

// Kernels::product, product_few, product_tiled, product_panels
enum Way { vectors, few, unit, panels };

void product(int rows, int n, int k, int bits, int group, int count, Way way, Codes codes = whole) {
  const Kernels& run = kernels();
  const Sample w(n, k, bits, group, codes);
  const std::vector<float> x = normal((size_t)rows * k), bias = normal(n);
  std::vector<float> y((size_t)rows * n);
  Digits d{};
  d.m = rows;
  d.k = k;
  d.group = group;
  d.count = count;
  d.even_odd = bits == 4;
  d.few = way == few;
  const int most = count == kFloats ? 4 : run.max_tile[count];
  d.tile = way == unit || way == panels ? kUnitRows
           : way == few                 ? tile_height(rows)
                                        : std::min(tile_height(std::min(rows, 8)), most);
  d.chunk = way == few ? 2 * kChunk : kChunk;
  const size_t padded = (size_t)d.tiles() * d.tile;
  std::vector<float> digits(padded * count * k * d.bytes() / sizeof(float));
  std::vector<float> meta(padded * 2 * (k / group));
  d.digits = reinterpret_cast<int8_t*>(digits.data());
  d.meta = meta.data();
  const Prologue p{x.data(), Type::f32, nullptr, Type::f32, 0, nullptr};
  Epilogue e{};
  e.y = y.data();
  e.scale = 1;
  e.bias = bias.data();
  parallel(d.tiles(), 1, [&](int a, int b) { run.prepare(p, d, a, b); });
  const auto kernel = way == unit     ? run.product_tiled
                      : way == few    ? run.product_few
                      : way == panels ? run.product_panels
                                      : run.product;
  const int step = way == unit || way == panels ? 34 : way == few ? 3 : 1;
  parallel(w.m.blocks(), step, [&](int a, int b) { kernel(w.m, d, e, a, b, 0, d.tiles()); });
  for (int m = 0; m < rows; m++)
    for (int i = 0; i < n; i++) {
      double sum = bias[i], size = std::abs(bias[i]);
      for (int j = 0; j < k; j++) {
        const double term = (double)x[(size_t)m * k + j] * w.dense[(size_t)i * k + j];
        sum += term;
        size += std::abs(term);
      }
      const double allowed = size * (count >= 3 ? 1e-6 : count == 2 ? 1e-4 : 2e-2);
      check(std::abs(y[(size_t)m * n + i] - sum) <= allowed, "product", rows, n, k);
    }
}

void attention(int length, int offset, int capacity, int tile, bool turned) {
  const int H = 6, KV = 2, D = 40;
  Sdpa a{};
  const std::vector<float> q = normal((size_t)H * length * D),
                           k = normal((size_t)KV * capacity * D),
                           v = normal((size_t)KV * capacity * D);
  std::vector<float> y((size_t)length * H * D);
  a.q = q.data();
  a.k_cache = k.data();
  a.v_cache = v.data();
  a.y = y.data();
  a.batch = 1;
  a.length = length;
  a.heads = H;
  a.kv_heads = KV;
  a.head_dim = D;
  a.capacity = capacity;
  a.offset = offset;
  a.scale = 0.2f;
  a.tile = tile;
  a.chunk = 512;
  a.chunks = (offset + length + 511) / 512;
  a.turned_keys = (offset + length + 63) / 64 * 64;
  std::vector<float> keys(turned ? (size_t)KV * a.turned_keys * D : 0);
  const int units = KV * ((H / KV * length + tile - 1) / tile);
  std::vector<float> partial(a.chunks > 1 ? (size_t)units * a.chunks * tile * (16 + 48) : 0);
  if (turned) {
    a.turned = keys.data();
    parallel(KV * a.turned_keys / 16, 1, [&](int i, int j) { kernels().sdpa_turn(a, i, j); });
  }
  parallel(units, 1, [&](int i, int j) { kernels().sdpa(a, i, j); });
  if (a.chunks > 1) {  // split over the chunks: the same bits
    std::vector<float> again(y.size());
    a.y = again.data();
    a.partial = partial.data();
    parallel(units * a.chunks, 1, [&](int i, int j) { kernels().sdpa(a, i, j); });
    parallel(units, 1, [&](int i, int j) { kernels().sdpa_merge(a, i, j); });
    check(again == y, "sdpa: split and whole differ", length, offset);
  }
  for (int h = 0; h < H; h++)
    for (int l = 0; l < length; l++) {
      const float* row = q.data() + ((size_t)h * length + l) * D;
      const size_t head = (size_t)(h / (H / KV)) * capacity * D;
      std::vector<double> p(offset + l + 1), o(D);
      double most = -1e30, total = 0;
      for (size_t j = 0; j < p.size(); j++) {
        for (int i = 0; i < D; i++) p[j] += a.scale * row[i] * k[head + j * D + i];
        most = std::max(most, p[j]);
      }
      for (double& x : p) total += x = std::exp(x - most);
      for (size_t j = 0; j < p.size(); j++)
        for (int i = 0; i < D; i++) o[i] += p[j] / total * v[head + j * D + i];
      for (int i = 0; i < D; i++)
        check(std::abs(o[i] - y[((size_t)l * H + h) * D + i]) < 1e-5, "sdpa", length, offset);
    }
}

void pool() {
  for (int n : {1, 2, 3, 8}) {
    set_threads(n);
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; c++)
      callers.emplace_back([] {
        for (int round = 0; round < 300; round++) {
          std::vector<int> hits(97);  // each element belongs to one step: no atomics needed
          parallel(97, 5, [&](int a, int b) {
            for (int i = a; i < b; i++) hits[i]++;
          });
          for (int h : hits)
            if (h != 1) std::abort();
          if (round % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
    for (auto& t : callers) t.join();
  }
  std::atomic<bool> stop{false};  // the number of threads changes while others work
  std::thread worker([&] {
    while (!stop) {
      std::atomic<int> sum{0};
      parallel(50, 1, [&](int a, int b) { sum += b - a; });
      if (sum != 50) std::abort();
    }
  });
  for (int i = 0; i < 30; i++) set_threads(1 + i % 4);
  stop = true;
  worker.join();
}

}  // namespace

int main(int argc, char** argv) {
  pool();
  set_threads(3);
  for (int i = 1; i < argc; i++) {
    try {
      force_isa(argv[i]);
    } catch (const std::exception&) {
      std::printf("%s: not on this machine\n", argv[i]);
      continue;
    }
    for (int bits : {4, 8})
      for (int count : {1, 2, 3})
        for (int rows : {1, 2, 3, 5, 9, 17}) {
          product(rows, 37, 128, bits, 32, count, vectors);
          product(rows, 16, 640, bits, 64, count, vectors);
          product(rows, 3, 256, bits, 128, count, vectors);
          if (!kernels().product_tiled) continue;
          product(rows, 37, 96, bits, 32, count, unit);
          product(rows, 16, 640, bits, 64, count, unit);
          product(rows, 150, 256, bits, 128, count, unit);
        }
    for (int rows : {1, 3, 9, 17}) {
      for (Way way : {vectors, panels}) {
        product(rows, 37, 608, 8, 32, kFloats, way, e4m3);
        product(rows, 150, 64, 8, 32, kFloats, way, e4m3);
      }
      product(rows, 37, 608, 4, 16, kFloats, panels, e2m1);
      product(rows, 3, 640, 4, 32, kFloats, panels, e2m1);
      product(rows, 37, 96, 4, 32, kFloats, panels);
      product(rows, 16, 640, 8, 64, kFloats, panels);
      product(rows, 150, 256, 4, 128, kFloats, panels);
    }
    product(280, 1100, 64, 4, 64, kFloats, panels);  // more of both than wait at once
    if (kernels().product_tiled)
      for (int bits : {4, 8})
        for (int count : {1, 2, 3}) {
          for (int rows : {3, 4, 5, 6, 7, 8}) {
            product(rows, 37, 640, bits, 64, count, few);
            product(rows, 70, 1152, bits, 128, count, few);
            product(rows, 16, 64, bits, 64, count, few);
          }
          product(70, 37, 416, bits, 32, count, unit);    // an odd number of tiles, several panels
          product(280, 1100, 64, bits, 64, count, unit);  // more of both than wait at once
        }
    attention(1, 0, 1, 3, false);
    attention(1, 600, 601, 3, false);
    attention(21, 530, 551, 16, true);
    attention(2, 70, 90, 6, false);
    std::printf("%s: right\n", argv[i]);
  }
}
