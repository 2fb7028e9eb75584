// What the MLX primitives share: checks at the door, dense inputs, scratch memory.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "mlx/version.h"
#include "types.h"

namespace qrun {

namespace mx = mlx::core;

inline std::string text(const mx::Shape& s) {
  std::string out = "(";
  for (size_t i = 0; i < s.size(); i++) out += (i ? ", " : "") + std::to_string(s[i]);
  return out + (s.size() == 1 ? ",)" : ")");
}

inline void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

inline void require_shape(const char* op, const char* name, const mx::array& a,
                          const mx::Shape& wanted) {
  require(a.shape() == wanted, std::string(op) + ": " + name + " has shape " + text(a.shape()) +
                                   ", expected " + text(wanted));
}

inline Type type_of(mx::Dtype t, const char* op, const char* name) {
  if (t == mx::float32) return Type::f32;
  if (t == mx::float16) return Type::f16;
  if (t == mx::bfloat16) return Type::bf16;
  throw std::invalid_argument(std::string(op) + ": " + name +
                              " must be float32, float16 or bfloat16");
}

inline mx::Dtype dtype_of(Type t) {
  return t == Type::f32 ? mx::float32 : t == Type::f16 ? mx::float16 : mx::bfloat16;
}

inline mx::Stream cpu_stream() { return mx::default_stream(mx::Device::cpu); }

// While a program is recorded (program.cpp), tasks and memory go to it instead of to the stream.
struct Recording {
  std::vector<std::function<void()>> tasks;
  std::vector<mx::array> memory;
};
inline thread_local Recording* recording = nullptr;

// Run f on the stream, after everything enqueued before.
template <class F>
void enqueue(mx::Stream s, F&& f) {
  if (recording)
    recording->tasks.emplace_back(std::forward<F>(f));
  else
    mx::cpu::get_command_encoder(s).dispatch(std::forward<F>(f));
}

// Memory for one evaluation, released when the tasks that use it are done.
inline void* scratch(size_t bytes, mx::Stream s) {
  mx::array a(block(bytes + kLine), {static_cast<int>(1)}, mx::uint8);
  char* p = a.data<char>() + to_line(a.data<char>());
  if (recording)
    recording->memory.push_back(std::move(a));
  else
    mx::cpu::get_command_encoder(s).add_temporary(std::move(a));
  return p;
}

// The array's elements in row order: its own memory, or a copy made on the stream. A sliced,
// broadcast or transposed input is copied, never misread.
const char* dense(const mx::array& a, mx::Stream s);

// Every op of ours runs on the CPU only and has no gradient.
class CpuPrimitive : public mx::Primitive {
 public:
  using Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + ": this op runs on the CPU only");
  }
};

// Result arrays get their memory when the op is evaluated.
template <class T>
T* allocate(mx::array& out) {
  mx::allocator::Data data = block(out.nbytes() + kLine);
  const size_t skip = to_line(data.buffer().raw_ptr());
  out.set_data(std::move(data), out.size(), out.strides(), out.flags(), skip);
  return reinterpret_cast<T*>(out.data<char>());
}

// The ops, as Python sees them.
mx::array pack(const mx::array& w, const mx::array& scales, const std::optional<mx::array>& biases,
               int bits, int group, const std::string& mode, int count);

struct ProductOptions {
  Type scales;
  std::string mode, activation, activations;
  std::optional<mx::array> norm, bias, residual;
  float eps, scale;
};
mx::array product(const char* op, const mx::array& x, const mx::array& packed, int n, int k,
                  int bits, int group, const ProductOptions& options);
// How a matrix is stored; throws where a format has no kernel.
Matrix format_of(const std::string& op, int n, int k, int bits, int group, Type scales,
                 const std::string& mode);
Matrix matrix_of(const char* op, const mx::array& packed, int n, int k, int bits, int group,
                 Type scales, const std::string& mode, int count = 1);

// How many digits "default", "exact" or "int8" mean for x of that type and a few or many rows.
int count_of_digits(const std::string& at, const std::string& activations, Type x, bool few);
// How m rows of x are written against w, in `count` digits: tiles of what height, for which kernel.
// `brief`: x is bfloat16 as it comes, which is one term of a matrix unit.
Digits digits_of(const Kernels& run, const Matrix& w, int m, int count, bool brief);
constexpr size_t kShareBytes = 64 << 10;     // packed bytes worth handing to another thread
constexpr size_t kStepBytes = 16 << 10;      // packed bytes taken at a time
constexpr size_t kLongStepBytes = 80 << 10;  // the same for product_few
constexpr size_t kPanelBytes = 768 << 10;    // digits of x that stay in L2 while blocks of w pass

mx::array gather_qmm(const mx::array& x, const mx::array& packed,
                     const std::optional<mx::array>& row, const mx::array& expert, int count, int n,
                     int k, int bits, int group, Type scales, const std::string& mode,
                     const std::string& activation, const std::string& activations);
std::vector<mx::array> route(const mx::array& logits, int top, bool renormalize);
mx::array combine(const mx::array& x, const mx::array& place, const mx::array& share,
                  const mx::array& residual);
Activation activation_of(const std::string& at, const std::string& name, int n);

mx::array gemm(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias,
               const std::optional<mx::array>& residual, float scale);
mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps,
                   const std::optional<mx::array>& residual, bool centered);
mx::array rms_norm_parts(const mx::array& x, const std::vector<mx::array>& weights, float eps);
mx::array swiglu(const mx::array& gate_up);
mx::array softcap(const mx::array& x, float limit);
mx::array argmax(const mx::array& logits, int limit);
mx::array embedding(const mx::array& ids, const mx::array& packed, int n, int k, int bits,
                    int group, Type scales, const std::string& mode, Type type, float scale);
std::vector<mx::array> rope(const mx::array& qkv, const mx::array& k_cache,
                            const mx::array& v_cache, const mx::array& offset,
                            const mx::array& table, int heads, int kv_heads, int head_dim,
                            const std::optional<mx::array>& q_norm,
                            const std::optional<mx::array>& k_norm, float eps);
mx::array sdpa(const mx::array& q, const mx::array& k_cache, const mx::array& v_cache,
               const mx::array& offset, float scale, int window, float softcap);

double read_bandwidth(size_t bytes, int threads);
double peak_flops(const std::string& kind, int use);
mx::array guarded(const mx::array& a);

}  // namespace qrun
