// qmv and qmm as MLX primitives: one contract, one class. The kernel marches over blocks of 16 rows
// of w; this file checks, prepares x and deals blocks and tiles of x out to the threads.
#include <algorithm>
#include <iterator>
#include <utility>

#include "../common/lease.h"
#include "../common/op.h"
#include "../common/pool.h"

namespace qrun {

Matrix matrix_of(const char* op, const mx::array& packed, int n, int k, int bits, int group,
                 Type scales, const std::string& mode, int count) {
  const std::string at = std::string(op) + ": ";
  require(n >= 1 && k >= 1, at + "n and k must be at least 1");
  require(k % group == 0, at + "k = " + std::to_string(k) +
                              " is not a multiple of group_size = " + std::to_string(group));
  const Matrix m = format_of(op, n, k, bits, group, scales, mode);
  const size_t bytes = m.block_bytes() * m.blocks() * count;
  require(packed.dtype() == mx::uint8 && packed.ndim() == 1 && packed.size() == bytes,
          at + "packed has shape " + text(packed.shape()) + ", expected (" + std::to_string(bytes) +
              ",) uint8, the result of pack() for n = " + std::to_string(n) +
              ", k = " + std::to_string(k));
  return m;
}

Activation activation_of(const std::string& at, const std::string& name, int n) {
  if (name == "none") return Activation::none;
  constexpr std::pair<const char*, Activation> known[] = {{"swiglu", Activation::swiglu},
                                                          {"geglu", Activation::geglu}};
  const auto* found = std::find_if(std::begin(known), std::end(known),
                                   [&](const auto& entry) { return name == entry.first; });
  require(found != std::end(known),
          at + "activation must be none, swiglu or geglu, not \"" + name + "\"");
  require(n % 2 == 0, at + "n = " + std::to_string(n) + " must be even for " + name);
  return found->second;
}

// float32 x keeps 24 bits. 16-bit x has at most 11 of its own: 16 lose nothing that its result
// could show, and serve the many rows of a prompt faster.
int count_of_digits(const std::string& at, const std::string& activations, Type x, bool few) {
  if (activations == "exact") return 3;
  if (activations == "int8") return 1;
  require(activations == "default",
          at + "activations must be default, exact or int8, not \"" + activations + "\"");
  return x == Type::f32 || few ? 3 : 2;
}

Digits digits_of(const Kernels& run, const Matrix& w, int m, int count, bool brief) {
  Digits d{};
  d.m = m;
  d.k = w.k;
  d.group = w.group;
  d.count = w.fp8 ? kFloats : count;
  d.even_odd = w.bits == 4;
  // A matrix unit, where there is one, wants 32 codes a scale, and pays from so many rows of x on.
  // For fewer it gives the bits of the vectors, sooner where groups are long and rows of w too, or
  // x has many.
  constexpr int kUnitFrom = 9;
  const bool bytes = run.product_tiled && w.group >= 32 && !w.fp8, unit = bytes && m >= kUnitFrom;
  // Panels of floats for many rows where there are no digits or they are slow: without a dot
  // product of bytes three of them, or two with a step for every short group
  // (kernels/qmm/README.md).
  const bool slow = !run.fast_dots && (count == 3 || (count == 2 && w.group <= 32));
  const bool panels = !unit && m >= run.panels_from && (w.fp8 || slow);
  if (panels) d.count = kFloats;
  if (unit && count > 1 && brief) {
    d.count = 1;
    d.exact = true;
  }
  d.few = bytes && !unit && w.group >= 64 && !w.fp4 && (m >= 7 || (m >= 3 && w.k >= 2048));
  const int most = w.fp8 ? 4 : d.few ? 8 : run.max_tile[count];
  d.tile = unit || panels ? kUnitRows : std::min(tile_height(std::min(m, 8)), most);
  d.chunk = std::min(d.group, d.few ? 2 * kChunk : kChunk);
  return d;
}

namespace {

constexpr size_t kAlikeRows = 8;  // up to here x has as many digits, and a row the same bits

class Product : public CpuPrimitive {
 public:
  Product(mx::Stream s, const char* name, Matrix w, Epilogue e, float eps, int digits, bool norm,
          bool bias, bool residual)
      : CpuPrimitive(s),
        name_(name),
        w_(w),
        e_(e),
        eps_(eps),
        digits_(digits),
        norm_(norm),
        bias_(bias),
        residual_(residual) {}

  const char* name() const override { return name_; }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    size_t next = 2;
    auto take = [&](bool there) { return there ? dense(in[next++], stream()) : nullptr; };
    Matrix w = w_;
    w.data = reinterpret_cast<const uint8_t*>(dense(in[1], stream()));
    Prologue p{dense(in[0], stream()),
               type_of(in[0].dtype(), name_, "x"),
               nullptr,
               Type::f32,
               eps_,
               nullptr};
    if (norm_) p.norm_type = type_of(in[next].dtype(), name_, "norm_weight");
    p.norm = take(norm_);
    Epilogue e = e_;
    if (bias_) e.bias_type = type_of(in[next].dtype(), name_, "bias");
    e.bias = take(bias_);
    if (residual_) e.residual_type = type_of(in[next].dtype(), name_, "residual");
    e.residual = take(residual_);
    e.y = allocate<char>(out[0]);

    const Kernels* run = &kernels();
    const bool brief = p.type == Type::bf16 && !p.norm;
    const Digits d = digits_of(*run, w, static_cast<int>(in[0].size() / w.k), digits_, brief);
    if (d.m == 0) return;
    enqueue(stream(), [run, w, p, d, e] { compute(*run, w, p, d, e); });
  }

 private:
  static void compute(const Kernels& run, const Matrix& w, const Prologue& p, const Digits& shape,
                      const Epilogue& e) {
    Digits d = shape;
    const size_t digits_bytes = in_lines(d.digits_bytes());
    const Lease lease(digits_bytes + d.meta_floats() * sizeof(float));
    d.digits = reinterpret_cast<int8_t*>(lease.data());
    d.meta = reinterpret_cast<float*>(d.digits + digits_bytes);
    const int tiles = d.tiles(), blocks = w.blocks();
    const size_t elements = static_cast<size_t>(d.m) * d.k;
    parallel(tiles, elements < 32768 ? tiles : std::max(1, tiles / (8 * threads())),
             [&](int t0, int t1) { run.prepare(p, d, t0, t1); });

    if (d.tile == kUnitRows) return wide(run, w, d, e);
    // A panel of x: as many tiles as stay in a core's L2. Items are (panel, run of blocks); a
    // thread's own follow each other in memory, so that runs may be short and threads end together.
    const size_t tile_bytes = static_cast<size_t>(d.tile) * d.count * d.k;
    const int panel = std::max(1, std::min(tiles, static_cast<int>(kPanelBytes / tile_bytes)));
    const int panels = (tiles + panel - 1) / panel;
    const size_t work = w.block_bytes() * std::min(panel, 4);
    // product_few takes blocks in pairs, and time to begin and to end: long runs.
    const int length = d.few ? std::max<int>(2, kLongStepBytes / work / 2 * 2)
                             : std::max<int>(1, kStepBytes / work);
    const int runs = (blocks + length - 1) / length;
    const int items = panels * runs;
    const bool small = work * blocks < kShareBytes;
    parallel(items, small ? items : 1, [&](int i0, int i1) {
      const auto kernel = d.few ? run.product_few : run.product;
      for (int i = i0, end; i < i1; i = end) {  // the runs of one panel
        end = std::min(i1, i - i % runs + runs);
        const int t0 = i / runs * panel, b0 = i % runs * length, b1 = b0 + (end - i) * length;
        kernel(w, d, e, b0, std::min(blocks, b1), t0, std::min(tiles, t0 + panel));
      }
    });
  }

  // On a matrix unit, or in panels of floats: tiles of x in shares of up to 16, w in runs of up to
  // 16 pairs of blocks (gates and ups come in pairs), whose sums stay in L2 together. Items that
  // follow each other read the same run of w.
  static void wide(const Kernels& run, const Matrix& w, const Digits& d, const Epilogue& e) {
    constexpr int most = 16;
    const int tiles = (d.tiles() + 1) / 2, shares = (d.tiles() + most - 1) / most;
    const int pairs = (w.blocks() + 1) / 2, even = shares % threads() ? threads() : 1;
    const int runs = std::min(pairs, (pairs + most * even - 1) / (most * even) * even);
    const auto kernel = d.count == kFloats ? run.product_panels : run.product_tiled;
    const auto part = [](int whole, int i, int of) {
      return static_cast<int>(static_cast<int64_t>(whole) * i / of) * 2;
    };
    parallel(shares * runs, 1, [&](int i0, int i1) {
      for (int i = i0; i < i1; i++) {
        const int s = i % shares, r = i / shares;
        kernel(w, d, e, part(pairs, r, runs), std::min(w.blocks(), part(pairs, r + 1, runs)),
               part(tiles, s, shares), std::min(d.tiles(), part(tiles, s + 1, shares)));
      }
    });
  }

  const char* name_;
  Matrix w_;
  Epilogue e_;
  float eps_;
  int digits_;
  bool norm_, bias_, residual_;
};

}  // namespace

mx::array product(const char* op, const mx::array& x, const mx::array& packed, int n, int k,
                  int bits, int group, const ProductOptions& o) {
  const std::string at = std::string(op) + ": ";
  require(
      x.ndim() >= 1 && x.shape(-1) == k,
      at + "x has shape " + text(x.shape()) + ", its last axis must be k = " + std::to_string(k));
  const Matrix w = matrix_of(op, packed, n, k, bits, group, o.scales, o.mode);
  Epilogue e{};
  e.type = type_of(x.dtype(), op, "x");
  e.scale = o.scale;
  e.activation = activation_of(at, o.activation, n);
  const bool gated = e.activation != Activation::none;
  mx::Shape shape = x.shape();
  shape.back() = gated ? n / 2 : n;
  const int digits = count_of_digits(at, o.activations, e.type, x.size() / k <= kAlikeRows);
  std::vector<mx::array> inputs{x, packed};
  if (o.norm) {
    require_shape(op, "norm_weight", *o.norm, {k});
    type_of(o.norm->dtype(), op, "norm_weight");
    inputs.push_back(*o.norm);
  }
  if (o.bias) {
    require_shape(op, "bias", *o.bias, {n});
    type_of(o.bias->dtype(), op, "bias");
    inputs.push_back(*o.bias);
  }
  if (o.residual) {
    require_shape(op, "residual", *o.residual, shape);
    type_of(o.residual->dtype(), op, "residual");
    inputs.push_back(*o.residual);
  }
  return mx::array(
      std::move(shape), x.dtype(),
      std::make_shared<Product>(cpu_stream(), op, w, e, o.eps, digits, o.norm.has_value(),
                                o.bias.has_value(), o.residual.has_value()),
      std::move(inputs));
}

}  // namespace qrun
