// The rest of a decoder layer as MLX primitives: checks, then the kernel over rows or items.
#include <algorithm>
#include <cstring>

#include "lease.h"
#include "op.h"
#include "pool.h"

namespace qrun {
namespace {

// Rows per step, so that a step is worth a thread: about 16K elements.
int rows_per_step(size_t elements_per_row) {
  return std::max<int>(1, static_cast<int>(16384 / std::max<size_t>(1, elements_per_row)));
}

class RmsNormOp : public CpuPrimitive {
 public:
  RmsNormOp(mx::Stream s, float eps, bool centered)
      : CpuPrimitive(s), eps_(eps), centered_(centered) {}
  const char* name() const override { return "qrun_rms_norm"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    RmsNorm a{dense(in[0], stream()),
              dense(in[1], stream()),
              in.size() > 2 ? dense(in[2], stream()) : nullptr,
              allocate<char>(out[0]),
              in[1].shape(0),
              eps_,
              centered_,
              type_of(in[0].dtype(), "rms_norm", "x"),
              type_of(in[1].dtype(), "rms_norm", "weight")};
    const int rows = static_cast<int>(in[0].size() / a.d);
    enqueue(stream(), [a, rows] {
      parallel(rows, rows_per_step(a.d), [&](int r0, int r1) { kernels().rms_norm(a, r0, r1); });
    });
  }

 private:
  float eps_;
  bool centered_;
};

// Several norms side by side in a row, and columns behind them that stay as they are.
class RmsNormPartsOp : public CpuPrimitive {
 public:
  RmsNormPartsOp(mx::Stream s, float eps) : CpuPrimitive(s), eps_(eps) {}
  const char* name() const override { return "qrun_rms_norm_parts"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const char* x = dense(in[0], stream());
    char* y = allocate<char>(out[0]);
    const Type type = type_of(in[0].dtype(), "rms_norm", "x");
    const size_t row = in[0].shape(1) * size_of(type);
    std::vector<RmsNorm> parts;
    size_t at = 0;
    for (size_t i = 1; i < in.size(); i++) {
      parts.push_back({x + at, dense(in[i], stream()), nullptr, y + at, in[i].shape(0), eps_, false,
                       type, type_of(in[i].dtype(), "rms_norm", "weight")});
      at += in[i].size() * size_of(type);
    }
    enqueue(stream(), [=, rows = in[0].shape(0)] {
      parallel(rows, rows_per_step(row / size_of(type)), [&](int r0, int r1) {
        for (size_t r = r0; r < static_cast<size_t>(r1); r++) {
          for (RmsNorm part : parts) {
            part.x = static_cast<const char*>(part.x) + r * row;
            part.y = static_cast<char*>(part.y) + r * row;
            kernels().rms_norm(part, 0, 1);
          }
          std::memcpy(y + r * row + at, x + r * row + at, row - at);
        }
      });
    });
  }

 private:
  float eps_;
};

class SwigluOp : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;
  const char* name() const override { return "qrun_swiglu"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const Type type = type_of(in[0].dtype(), "swiglu", "gate_up");
    enqueue(stream(),
            [x = dense(in[0], stream()), y = allocate<char>(out[0]), type, size = out[0].size()] {
              constexpr size_t step = 4096;
              parallel(static_cast<int>((size + step - 1) / step), 1, [&](int i0, int i1) {
                kernels().swiglu(x, y, type, i0 * step, std::min(size, i1 * step));
              });
            });
  }
};

class SoftcapOp : public CpuPrimitive {
 public:
  SoftcapOp(mx::Stream s, float limit) : CpuPrimitive(s), limit_(limit) {}
  const char* name() const override { return "qrun_softcap"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const Type type = type_of(in[0].dtype(), "softcap", "x");
    enqueue(stream(), [x = dense(in[0], stream()), y = allocate<char>(out[0]), type, limit = limit_,
                       size = out[0].size()] {
      constexpr size_t step = 4096;
      parallel(static_cast<int>((size + step - 1) / step), 1, [&](int i0, int i1) {
        kernels().softcap(x, y, type, limit, i0 * step, std::min(size, i1 * step));
      });
    });
  }

 private:
  float limit_;
};

class ArgmaxOp : public CpuPrimitive {
 public:
  ArgmaxOp(mx::Stream s, int limit) : CpuPrimitive(s), limit_(limit) {}
  const char* name() const override { return "qrun_argmax"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const Type type = type_of(in[0].dtype(), "argmax", "logits");
    const int n = in[0].shape(-1), rows = static_cast<int>(out[0].size());
    enqueue(stream(), [x = dense(in[0], stream()), y = allocate<int32_t>(out[0]), type, n, rows,
                       limit = limit_] {
      parallel(rows, 1, [&](int r0, int r1) {
        for (int r = r0; r < r1; r++)
          y[r] = kernels().argmax(x + static_cast<size_t>(r) * n * size_of(type), type, limit);
      });
    });
  }

 private:
  int limit_;
};

class EmbeddingOp : public CpuPrimitive {
 public:
  EmbeddingOp(mx::Stream s, Matrix w, float scale) : CpuPrimitive(s), w_(w), scale_(scale) {}
  const char* name() const override { return "qrun_embedding"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    Matrix w = w_;
    w.data = reinterpret_cast<const uint8_t*>(dense(in[1], stream()));
    const bool wide = in[0].itemsize() == 8;
    enqueue(stream(), [ids = dense(in[0], stream()), wide, y = allocate<char>(out[0]),
                       type = type_of(out[0].dtype(), "embedding", "result"),
                       rows = static_cast<int>(in[0].size()), w, scale = scale_] {
      parallel(rows, rows_per_step(w.k * 4),
               [&](int r0, int r1) { kernels().embedding(w, ids, wide, y, type, scale, r0, r1); });
    });
  }

 private:
  Matrix w_;
  float scale_;
};

class RopeOp : public CpuPrimitive {
 public:
  RopeOp(mx::Stream s, Rope a, bool q_norm, bool k_norm)
      : CpuPrimitive(s), a_(a), q_norm_(q_norm), k_norm_(k_norm) {}
  const char* name() const override { return "qrun_rope"; }
  // in: qkv, k_cache, v_cache, offset, table, [q_norm], [k_norm]
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    for (int i : {1, 2})
      require(in[i].flags().row_contiguous,
              "rope: the caches are updated in place and must be row contiguous");
    Rope a = a_;
    a.qkv = dense(in[0], stream());
    a.table = reinterpret_cast<const float*>(dense(in[4], stream()));
    a.q_norm = q_norm_ ? dense(in[5], stream()) : nullptr;
    a.k_norm = k_norm_ ? dense(in[5 + q_norm_], stream()) : nullptr;
    a.q = allocate<char>(out[0]);
    out[1].copy_shared_buffer(in[1]);
    out[2].copy_shared_buffer(in[2]);
    a.k_cache = out[1].data<char>();
    a.v_cache = out[2].data<char>();
    const int rows = in[4].shape(0);
    enqueue(stream(),
            [given = a, rows, offset = reinterpret_cast<const int*>(dense(in[3], stream()))] {
              Rope a = given;
              a.offset = *offset;
              if (a.offset < 0 || a.offset + a.length > std::min(a.capacity, rows))
                throw std::out_of_range("rope: positions " + std::to_string(a.offset) + " to " +
                                        std::to_string(a.offset + a.length - 1) +
                                        " do not fit a cache of " + std::to_string(a.capacity) +
                                        " and a table of " + std::to_string(rows));
              const size_t row = static_cast<size_t>(a.heads + 2 * a.kv_heads) * a.head_dim;
              parallel(a.batch * a.length, rows_per_step(row),
                       [&](int i0, int i1) { kernels().rope(a, i0, i1); });
            });
  }

 private:
  Rope a_;
  bool q_norm_, k_norm_;
};

class SdpaOp : public CpuPrimitive {
 public:
  SdpaOp(mx::Stream s, Sdpa a) : CpuPrimitive(s), a_(a) {}
  const char* name() const override { return "qrun_sdpa"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    Sdpa a = a_;
    a.q = dense(in[0], stream());
    for (int i : {1, 2})
      require(in[i].flags().row_contiguous, "sdpa: the caches must be row contiguous");
    a.k_cache = in[1].data<char>();
    a.v_cache = in[2].data<char>();
    a.y = allocate<char>(out[0]);
    const int group = a.heads / a.kv_heads, rows = group * a.length;
    a.tile = std::min(rows, 16);
    const int units = a.batch * a.kv_heads * ((rows + a.tile - 1) / a.tile);
    // Few tiles: share their chunks out as well. The split changes no bit of the result.
    const bool split = units < 4 * threads();
    const size_t per_row = 16 + (a.head_dim + 15) / 16 * 16;
    const size_t heads = static_cast<size_t>(a.batch) * a.kv_heads;
    const bool turn = units >= 4 * a.batch * a.kv_heads;  // a prompt: each key meets many tiles
    // Each run starts from `given`: a recorded task runs again with another offset.
    enqueue(stream(), [given = a, units, heads, split, turn, per_row,
                       offset = reinterpret_cast<const int*>(dense(in[3], stream()))] {
      Sdpa a = given;
      a.offset = *offset;
      const int keys = a.offset + a.length;
      if (a.offset < 0 || keys > a.capacity)
        throw std::out_of_range("sdpa: " + std::to_string(keys) + " keys in a cache of " +
                                std::to_string(a.capacity));
      a.chunks = (keys + a.chunk - 1) / a.chunk;
      a.turned_keys = (keys + 63) / 64 * 64;  // whole blocks
      const bool parts = split && a.chunks > 1;
      const size_t partial = parts ? sizeof(float) * units * a.chunks * a.tile * per_row : 0;
      const size_t turned = turn ? sizeof(float) * heads * a.turned_keys * a.head_dim : 0;
      const Lease lease(partial + turned);
      char* memory = lease.data();
      if (parts) a.partial = reinterpret_cast<float*>(memory);
      if (turn) {
        a.turned = reinterpret_cast<float*>(memory + partial);
        parallel(static_cast<int>(heads) * a.turned_keys / 16, 16,
                 [&](int i0, int i1) { kernels().sdpa_turn(a, i0, i1); });
      }
      const size_t bytes = 2 * size_of(a.cache_type) * a.head_dim * std::min(keys, a.chunk);
      const int items = a.partial ? units * a.chunks : units;
      const int step = static_cast<int>(std::max<size_t>(1, (16 << 10) / bytes));
      parallel(items, step, [&](int i0, int i1) { kernels().sdpa(a, i0, i1); });
      if (a.partial)
        parallel(units, units, [&](int i0, int i1) { kernels().sdpa_merge(a, i0, i1); });
    });
  }

 private:
  Sdpa a_;
};

}  // namespace

mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps,
                   const std::optional<mx::array>& residual, bool centered) {
  require(x.ndim() >= 1 && x.shape(-1) >= 1, "rms_norm: x must have a last axis");
  require_shape("rms_norm", "weight", weight, {x.shape(-1)});
  type_of(x.dtype(), "rms_norm", "x");
  type_of(weight.dtype(), "rms_norm", "weight");
  std::vector<mx::array> inputs{x, weight};
  if (residual) {
    require_shape("rms_norm", "residual", *residual, x.shape());
    require(residual->dtype() == x.dtype(), "rms_norm: residual and x must have one dtype");
    inputs.push_back(*residual);
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<RmsNormOp>(cpu_stream(), eps, centered),
                   std::move(inputs));
}

mx::array rms_norm_parts(const mx::array& x, const std::vector<mx::array>& weights, float eps) {
  require(x.ndim() == 2, "rms_norm: x must have two axes");
  type_of(x.dtype(), "rms_norm", "x");
  std::vector<mx::array> inputs{x};
  int width = 0;
  for (const mx::array& weight : weights) {
    require(weight.ndim() == 1, "rms_norm: a weight must have one axis");
    type_of(weight.dtype(), "rms_norm", "weight");
    width += weight.shape(0);
    inputs.push_back(weight);
  }
  require(width <= x.shape(1), "rms_norm: weights are for " + std::to_string(width) +
                                   " columns, x has " + std::to_string(x.shape(1)));
  return mx::array(x.shape(), x.dtype(), std::make_shared<RmsNormPartsOp>(cpu_stream(), eps),
                   std::move(inputs));
}

mx::array swiglu(const mx::array& gate_up) {
  require(gate_up.ndim() >= 1 && gate_up.shape(-1) % 2 == 0,
          "swiglu: gate_up has shape " + text(gate_up.shape()) + ", its last axis must be even");
  type_of(gate_up.dtype(), "swiglu", "gate_up");
  mx::Shape shape = gate_up.shape();
  shape.back() /= 2;
  return mx::array(std::move(shape), gate_up.dtype(), std::make_shared<SwigluOp>(cpu_stream()),
                   {gate_up});
}

mx::array softcap(const mx::array& x, float limit) {
  type_of(x.dtype(), "softcap", "x");
  return mx::array(x.shape(), x.dtype(), std::make_shared<SoftcapOp>(cpu_stream(), limit), {x});
}

mx::array argmax(const mx::array& logits, int limit) {
  require(logits.ndim() >= 1 && logits.shape(-1) >= 1, "argmax: logits must have a last axis");
  require(limit >= 1 && limit <= logits.shape(-1), "argmax: limit must lie in 1 .. V");
  type_of(logits.dtype(), "argmax", "logits");
  mx::Shape shape(logits.shape().begin(), logits.shape().end() - 1);
  return mx::array(std::move(shape), mx::int32, std::make_shared<ArgmaxOp>(cpu_stream(), limit),
                   {logits});
}

mx::array embedding(const mx::array& ids, const mx::array& packed, int n, int k, int bits,
                    int group, Type scales, const std::string& mode, Type type, float scale) {
  const Matrix w = matrix_of("embedding", packed, n, k, bits, group, scales, mode);
  require(ids.dtype() == mx::int32 || ids.dtype() == mx::uint32 || ids.dtype() == mx::int64,
          "embedding: ids must be int32, uint32 or int64");
  mx::Shape shape = ids.shape();
  shape.push_back(k);
  return mx::array(std::move(shape), dtype_of(type),
                   std::make_shared<EmbeddingOp>(cpu_stream(), w, scale), {ids, packed});
}

std::vector<mx::array> rope(const mx::array& qkv, const mx::array& k_cache,
                            const mx::array& v_cache, const mx::array& offset,
                            const mx::array& table, int heads, int kv_heads, int head_dim,
                            const std::optional<mx::array>& q_norm,
                            const std::optional<mx::array>& k_norm, float eps) {
  require(heads >= 1 && kv_heads >= 1 && head_dim >= 1 && head_dim <= 512,
          "rope: heads and kv_heads must be at least 1, head_dim 1 to 512");
  require(qkv.ndim() == 3 && qkv.shape(2) == (heads + 2 * kv_heads) * head_dim,
          "rope: qkv has shape " + text(qkv.shape()) + ", expected (B, L, " +
              std::to_string((heads + 2 * kv_heads) * head_dim) + ")");
  Rope a{};
  a.batch = qkv.shape(0);
  a.length = qkv.shape(1);
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.eps = eps;
  require(k_cache.ndim() == 4, "rope: k_cache must be (B, Hkv, C, D)");
  a.capacity = k_cache.shape(2);
  require_shape("rope", "k_cache", k_cache, {a.batch, kv_heads, a.capacity, head_dim});
  require_shape("rope", "v_cache", v_cache, k_cache.shape());
  require(k_cache.dtype() == v_cache.dtype(), "rope: k_cache and v_cache must have one dtype");
  require(offset.dtype() == mx::int32 && offset.size() >= 1, "rope: offset must be int32");
  require(
      table.dtype() == mx::float32 && table.ndim() == 3 && table.shape(2) == 2 &&
          2 * table.shape(1) <= head_dim,
      "rope: table has shape " + text(table.shape()) +
          ", expected float32 (C, R/2, 2) with R at most head_dim = " + std::to_string(head_dim));
  a.rotated = 2 * table.shape(1);
  a.type = type_of(qkv.dtype(), "rope", "qkv");
  a.cache_type = type_of(k_cache.dtype(), "rope", "k_cache");
  std::vector<mx::array> inputs{qkv, k_cache, v_cache, offset, table};
  for (const auto* norm : {&q_norm, &k_norm})
    if (*norm) {
      require_shape("rope", norm == &q_norm ? "q_norm" : "k_norm", **norm, {head_dim});
      a.norm_type = type_of((*norm)->dtype(), "rope", "q_norm and k_norm");
      inputs.push_back(**norm);
    }
  require(!q_norm || !k_norm || q_norm->dtype() == k_norm->dtype(),
          "rope: q_norm and k_norm must have one dtype");
  return mx::array::make_arrays(
      {{a.batch, heads, a.length, head_dim}, k_cache.shape(), v_cache.shape()},
      {qkv.dtype(), k_cache.dtype(), v_cache.dtype()},
      std::make_shared<RopeOp>(cpu_stream(), a, q_norm.has_value(), k_norm.has_value()), inputs);
}

mx::array sdpa(const mx::array& q, const mx::array& k_cache, const mx::array& v_cache,
               const mx::array& offset, float scale, int window, float softcap) {
  require(q.ndim() == 4 && q.shape(3) <= 512,
          "sdpa: q has shape " + text(q.shape()) + ", expected (B, H, L, D) with D at most 512");
  require(k_cache.ndim() == 4, "sdpa: k_cache must be (B, Hkv, C, D)");
  Sdpa a{};
  a.batch = q.shape(0);
  a.heads = q.shape(1);
  a.length = q.shape(2);
  a.head_dim = q.shape(3);
  a.kv_heads = k_cache.shape(1);
  a.capacity = k_cache.shape(2);
  require_shape("sdpa", "k_cache", k_cache, {a.batch, a.kv_heads, a.capacity, a.head_dim});
  require_shape("sdpa", "v_cache", v_cache, k_cache.shape());
  require(k_cache.dtype() == v_cache.dtype(), "sdpa: k_cache and v_cache must have one dtype");
  require(a.kv_heads >= 1 && a.heads % a.kv_heads == 0,
          "sdpa: heads = " + std::to_string(a.heads) +
              " is not a multiple of kv_heads = " + std::to_string(a.kv_heads));
  require(offset.dtype() == mx::int32 && offset.size() >= 1, "sdpa: offset must be int32");
  require(window >= 0 && softcap >= 0, "sdpa: window and softcap must not be negative");
  a.window = window;
  a.scale = scale;
  a.softcap = softcap;
  a.chunk = 512;
  a.type = type_of(q.dtype(), "sdpa", "q");
  a.cache_type = type_of(k_cache.dtype(), "sdpa", "k_cache");
  return mx::array({a.batch, a.length, a.heads * a.head_dim}, q.dtype(),
                   std::make_shared<SdpaOp>(cpu_stream(), a), {q, k_cache, v_cache, offset});
}

}  // namespace qrun
