// Rows of x against the matrix of the expert that each is sent to. Nothing is multiplied here: the
// rows of one expert that follow each other (a run) are a product of qmv.cpp or qmm.cpp over that
// expert's part of the stream, and this file deals the runs out to the threads.
//
//   run     rows r .. r+m-1 of the result, all of expert e. Decode: a row or two. A prompt: all
//           tokens of an expert, so that its matrix is read once.
//   piece   a panel of a run's rows of x that stays in L2
//   item    a piece against some blocks of w: what a thread takes
#include <algorithm>

#include "../common/lease.h"
#include "../common/op.h"
#include "../common/pool.h"

namespace qrun {
namespace {

// Sixteen tokens of eight experts each: up to here x has as many digits.
constexpr int kAlikeRows = 128;

struct Run {
  int expert, first;  // first row of the result
  Digits x;
};
struct Piece {
  const Run* run;
  int tile0, tile1;
};

class GatherQmm : public CpuPrimitive {
 public:
  GatherQmm(mx::Stream s, Matrix w, int experts, Epilogue e, int digits)
      : CpuPrimitive(s), w_(w), experts_(experts), e_(e), digits_(digits) {}
  const char* name() const override { return "qrun_gather_qmm"; }

  // in: x, packed, expert, [row]
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    Task t{};
    t.kernels = &kernels();
    t.w = w_;
    t.w.data = reinterpret_cast<const uint8_t*>(dense(in[1], stream()));
    t.e = e_;
    t.e.y = allocate<char>(out[0]);
    t.x = dense(in[0], stream());
    t.experts = experts_;
    t.x_rows = in[0].shape(0);
    t.rows = out[0].shape(0);
    t.expert = reinterpret_cast<const int*>(dense(in[2], stream()));
    t.row = in.size() > 3 ? reinterpret_cast<const int*>(dense(in[3], stream())) : nullptr;
    t.count = w_.fp8 ? kFloats : digits_;
    if (t.rows) enqueue(stream(), [t]() mutable { t.run(); });
  }

 private:
  struct Task {
    const Kernels* kernels;
    Matrix w;  // of expert 0
    Epilogue e;
    const char* x;      // (x_rows, k)
    const int* expert;  // (rows,)
    const int* row;     // (rows,), or null: row r of x
    int experts, x_rows, rows, count;

    std::vector<Run> runs() const {
      std::vector<Run> found;
      for (int r = 0, end; r < rows; r = end) {
        for (end = r + 1; end < rows && expert[end] == expert[r];) end++;
        found.push_back(
            {expert[r], r, digits_of(*kernels, w, end - r, count, e.type == Type::bf16)});
      }
      return found;
    }

    void check() const {
      for (int r = 0; r < rows; r++) {
        const int from = row ? row[r] : r;
        if (expert[r] < 0 || expert[r] >= experts || from < 0 || from >= x_rows)
          throw std::out_of_range("gather_qmm: row " + std::to_string(from) + " of " +
                                  std::to_string(x_rows) + " to expert " +
                                  std::to_string(expert[r]) + " of " + std::to_string(experts));
      }
    }

    void prepare(const Run& run, int tile0, int tile1) const {
      const char* from = row ? x : x + static_cast<size_t>(run.first) * w.k * size_of(e.type);
      kernels->prepare({from, e.type, nullptr, Type::f32, 0, row ? row + run.first : nullptr},
                       run.x, tile0, tile1);
    }

    void run() const {
      check();
      std::vector<Run> all = runs();
      size_t digits_bytes = 0, meta_floats = 0;
      for (const Run& run : all) {
        digits_bytes += in_lines(run.x.digits_bytes());
        meta_floats += run.x.meta_floats();
      }
      const Lease lease(digits_bytes + meta_floats * sizeof(float));
      int8_t* digits = reinterpret_cast<int8_t*>(lease.data());
      float* meta = reinterpret_cast<float*>(digits + digits_bytes);
      for (Run& run : all) {
        run.x.digits = digits;
        run.x.meta = meta;
        digits += in_lines(run.x.digits_bytes());
        meta += run.x.meta_floats();
      }
      compute(all);
    }

    void compute(const std::vector<Run>& all) const {
      std::vector<Piece> tiles, panels;
      const int blocks = w.blocks(), groups = threads();
      for (const Run& run : all) {
        const size_t tile_bytes = static_cast<size_t>(run.x.tile) * run.x.count * w.k;
        const int panel = std::max(1, static_cast<int>(kPanelBytes / tile_bytes));
        for (int t = 0; t < run.x.tiles(); t++) tiles.push_back({&run, t, t + 1});
        for (int t = 0; t < run.x.tiles(); t += panel)
          panels.push_back({&run, t, std::min(run.x.tiles(), t + panel)});
      }
      const int all_tiles = static_cast<int>(tiles.size());
      const bool small = static_cast<size_t>(rows) * w.k < 32768;
      parallel(all_tiles, small ? all_tiles : std::max(1, all_tiles / (8 * groups)),
               [&](int i0, int i1) {
                 for (int i = i0; i < i1; i++)
                   prepare(*tiles[i].run, tiles[i].tile0, tiles[i].tile1);
               });

      const int pieces = static_cast<int>(panels.size());
      const int least = std::max<int>(1, kShareBytes / 2 / w.block_bytes());
      const int64_t share = static_cast<int64_t>(pieces) * blocks / (4 * groups);
      const int length = std::max(least, static_cast<int>(std::min<int64_t>(blocks, share)));
      const int lengths = (blocks + length - 1) / length;
      parallel(pieces * lengths, 1, [&](int i0, int i1) {
        for (int i = i0; i < i1; i++) multiply(panels[i / lengths], i % lengths * length, length);
      });
    }

    void multiply(const Piece& piece, int block0, int length) const {
      const Run& run = *piece.run;
      Matrix m = w;
      m.data += static_cast<size_t>(run.expert) * w.block_bytes() * w.blocks();
      Epilogue to = e;
      const int width = e.activation == Activation::none ? w.n : w.n / 2;
      to.y = static_cast<char*>(e.y) + static_cast<size_t>(run.first) * width * size_of(e.type);
      const auto kernel = run.x.few                 ? kernels->product_few
                          : run.x.tile != kUnitRows ? kernels->product
                          : run.x.count == kFloats  ? kernels->product_panels
                                                    : kernels->product_tiled;
      kernel(m, run.x, to, block0, std::min(w.blocks(), block0 + length), piece.tile0, piece.tile1);
    }
  };

  Matrix w_;
  int experts_;
  Epilogue e_;
  int digits_;
};

}  // namespace

mx::array gather_qmm(const mx::array& x, const mx::array& packed,
                     const std::optional<mx::array>& row, const mx::array& expert, int count, int n,
                     int k, int bits, int group, Type scales, const std::string& mode,
                     const std::string& activation, const std::string& activations) {
  const std::string at = "gather_qmm: ";
  require(x.ndim() == 2 && x.shape(1) == k,
          at + "x has shape " + text(x.shape()) + ", expected (M, " + std::to_string(k) + ")");
  require(count >= 1, at + "count must be at least 1");
  const Matrix w = matrix_of("gather_qmm", packed, n, k, bits, group, scales, mode, count);
  require(expert.ndim() == 1 && expert.dtype() == mx::int32, at + "expert must be int32 (R,)");
  std::vector<mx::array> inputs{x, packed, expert};
  if (row) {
    require_shape("gather_qmm", "row", *row, expert.shape());
    require(row->dtype() == mx::int32, at + "row must be int32 (R,)");
    inputs.push_back(*row);
  }
  Epilogue e{};
  e.type = type_of(x.dtype(), "gather_qmm", "x");
  e.scale = 1;
  e.activation = activation_of(at, activation, n);
  const int width = e.activation == Activation::none ? n : n / 2;
  const int digits = count_of_digits(at, activations, e.type, expert.shape(0) <= kAlikeRows);
  return mx::array({expert.shape(0), width}, x.dtype(),
                   std::make_shared<GatherQmm>(cpu_stream(), w, count, e, digits),
                   std::move(inputs));
}

}  // namespace qrun
