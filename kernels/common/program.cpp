// A traced function as one primitive, so that a decode step costs one node of MLX's graph.
//
// A step of a small model is some two hundred ops of a few microseconds each. Building, scheduling
// and releasing that many graph nodes keeps the main thread busy for 2 ms, on a core that the
// kernels need. But the graph is the same at every step: so it is walked once, each op allocates
// its results once, and the tasks it would have put on the stream are kept (op.h: `recording`).
// A replay is one task that runs them all, on the same memory every time:
//
//   inputs --copy--> tape.inputs --tasks--> tape.outputs --copy--> results
//
// Replays follow each other on one stream, so reusing the memory is safe.
#include "program.h"

#include <cstring>
#include <unordered_map>

namespace qrun {

struct Program::Tape {
  std::vector<mx::array> inputs, outputs;  // fixed memory
  Recording recording;
};

namespace {

mx::array fixed_copy_of(const mx::array& a) {
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  allocate<char>(copy);
  return copy;
}

class Replay : public CpuPrimitive {
 public:
  Replay(mx::Stream s, std::shared_ptr<const Program::Tape> tape)
      : CpuPrimitive(s), tape_(std::move(tape)) {}
  const char* name() const override { return "qrun_program"; }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    std::vector<const char*> from;
    std::vector<char*> to;
    // Inputs behind the tape's own only ask for order.
    for (size_t i = 0; i < tape_->inputs.size(); i++) from.push_back(dense(in[i], stream()));
    for (mx::array& a : out) to.push_back(allocate<char>(a));
    enqueue(stream(), [tape = tape_, from = std::move(from), to = std::move(to)] {
      auto inputs = tape->inputs;  // copies of handles, whose memory is the tape's
      for (size_t i = 0; i < from.size(); i++)
        std::memcpy(inputs[i].data<char>(), from[i], inputs[i].nbytes());
      for (const auto& task : tape->recording.tasks) task();
      for (size_t i = 0; i < to.size(); i++)
        std::memcpy(to[i], tape->outputs[i].data<char>(), tape->outputs[i].nbytes());
    });
  }

 private:
  std::shared_ptr<const Program::Tape> tape_;
};

// Evaluates a graph into fixed memory: an op's eval_cpu allocates and enqueues, nothing runs yet.
class Recorder {
 public:
  explicit Recorder(Recording& r) : saved_(recording) { recording = &r; }
  ~Recorder() { recording = saved_; }

  void bind(const mx::array& a, const mx::array& value) { values_.emplace(a.id(), value); }

  const mx::array& value(const mx::array& a) {
    if (auto at = values_.find(a.id()); at != values_.end()) return at->second;
    if (!a.has_primitive()) return values_.emplace(a.id(), a).first->second;
    mx::Primitive& op = a.primitive();
    // A reshape of dense data only makes another view. Other ops of MLX enqueue by themselves.
    require(dynamic_cast<CpuPrimitive*>(&op) || std::string(op.name()) == "Reshape",
            std::string("program: ") + op.name() + " cannot be recorded");
    std::vector<mx::array> in, out;
    for (const mx::array& i : a.inputs()) in.push_back(value(i));
    const auto outputs = a.outputs();
    for (const mx::array& o : outputs)
      out.emplace_back(o.shape(), o.dtype(), nullptr, std::vector<mx::array>{});
    op.eval_cpu(in, out);
    for (size_t i = 0; i < out.size(); i++) values_.emplace(outputs[i].id(), out[i]);
    // Kept alive; also, no later op may take a result's memory over as its own.
    recording->memory.insert(recording->memory.end(), in.begin(), in.end());
    recording->memory.insert(recording->memory.end(), out.begin(), out.end());
    return values_.at(a.id());
  }

 private:
  Recording* saved_;
  std::unordered_map<std::uintptr_t, mx::array> values_;
};

}  // namespace

Program::Program(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs) {
  auto tape = std::make_shared<Tape>();
  Recorder recorder(tape->recording);
  for (const mx::array& a : inputs) {
    tape->inputs.push_back(fixed_copy_of(a));
    recorder.bind(a, tape->inputs.back());
  }
  for (const mx::array& a : outputs) tape->outputs.push_back(recorder.value(a));
  tape_ = std::move(tape);
}

std::vector<mx::array> Program::operator()(const std::vector<mx::array>& inputs,
                                           const std::vector<mx::array>& after) const {
  require(inputs.size() == tape_->inputs.size(),
          "program: recorded with " + std::to_string(tape_->inputs.size()) +
              " inputs, called with " + std::to_string(inputs.size()));
  for (size_t i = 0; i < inputs.size(); i++)
    require(inputs[i].shape() == tape_->inputs[i].shape() &&
                inputs[i].dtype() == tape_->inputs[i].dtype(),
            "program: input " + std::to_string(i) + " has shape " + text(inputs[i].shape()) +
                ", recorded with " + text(tape_->inputs[i].shape()));
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& a : tape_->outputs) {
    shapes.push_back(a.shape());
    dtypes.push_back(a.dtype());
  }
  std::vector<mx::array> needed = inputs;
  needed.insert(needed.end(), after.begin(), after.end());
  return mx::array::make_arrays(shapes, dtypes, std::make_shared<Replay>(cpu_stream(), tape_),
                                needed);
}

}  // namespace qrun
