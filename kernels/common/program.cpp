// A traced function as one primitive, so that a decode step costs one node of MLX's graph.
//
// A step of a small model is some two hundred ops of a few microseconds each; building, scheduling
// and releasing that many graph nodes takes MLX as long as a third of the arithmetic. The graph is
// the same at every step, so it is walked once: `nodes` lists its primitives in an order in which
// every input comes before its use, and `Replay` runs their eval_cpu one after another.
#include "program.h"

#include <unordered_map>
#include <unordered_set>

namespace qrun {

struct Node {
  std::shared_ptr<mx::Primitive> primitive;
  std::vector<int> in, out;  // slots
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
};

// Slots number the arrays of a step: the inputs, then constants, then the results of nodes.
struct Tape {
  std::vector<mx::Shape> input_shapes;
  std::vector<mx::array> constants;
  std::vector<Node> nodes;
  std::vector<int> out;
  int slots = 0;
};

namespace {

class Replay : public CpuPrimitive {
 public:
  Replay(mx::Stream s, std::shared_ptr<const Tape> tape)
      : CpuPrimitive(s), tape_(std::move(tape)) {}
  const char* name() const override { return "qrun_program"; }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    std::vector<mx::array> slots;
    slots.reserve(tape_->slots);
    slots.insert(slots.end(), in.begin(), in.end());
    slots.insert(slots.end(), tape_->constants.begin(), tape_->constants.end());
    std::vector<mx::array> inputs, outputs;
    for (const Node& node : tape_->nodes) {
      inputs.clear();
      outputs.clear();
      for (int i : node.in) inputs.push_back(slots[i]);
      for (size_t i = 0; i < node.out.size(); i++)
        outputs.emplace_back(node.shapes[i], node.dtypes[i], nullptr, std::vector<mx::array>{});
      node.primitive->eval_cpu(inputs, outputs);
      slots.insert(slots.end(), outputs.begin(), outputs.end());
    }
    for (size_t i = 0; i < out.size(); i++) out[i].copy_shared_buffer(slots[tape_->out[i]]);
    // The tasks that use these arrays have only been queued.
    mx::cpu::get_command_encoder(stream()).add_temporaries(std::move(slots));
  }

 private:
  std::shared_ptr<const Tape> tape_;
};

class Tracer {
 public:
  explicit Tracer(Tape& tape) : tape_(tape) {}

  void input(const mx::array& a) { slot_[a.id()] = tape_.slots++; }

  // Constants have their slots before any node: they are found in a walk of their own.
  void constants(const mx::array& a) {
    if (!seen_.insert(a.id()).second || slot_.count(a.id())) return;
    if (!a.has_primitive()) {
      slot_[a.id()] = tape_.slots++;
      tape_.constants.push_back(a);
      return;
    }
    for (const mx::array& i : a.inputs()) constants(i);
  }

  int visit(const mx::array& a) {
    if (auto at = slot_.find(a.id()); at != slot_.end()) return at->second;
    Node node{a.primitive_ptr(), {}, {}, {}, {}};
    for (const mx::array& i : a.inputs()) node.in.push_back(visit(i));
    for (const mx::array& o : a.outputs()) {
      slot_[o.id()] = tape_.slots;
      node.out.push_back(tape_.slots++);
      node.shapes.push_back(o.shape());
      node.dtypes.push_back(o.dtype());
    }
    tape_.nodes.push_back(std::move(node));
    return slot_.at(a.id());
  }

 private:
  Tape& tape_;
  std::unordered_map<std::uintptr_t, int> slot_;
  std::unordered_set<std::uintptr_t> seen_;
};

}  // namespace

Program::Program(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs) {
  auto tape = std::make_shared<Tape>();
  Tracer tracer(*tape);
  for (const mx::array& a : inputs) {
    tracer.input(a);
    tape->input_shapes.push_back(a.shape());
  }
  for (const mx::array& a : outputs) tracer.constants(a);
  for (const mx::array& a : outputs) {
    tape->out.push_back(tracer.visit(a));
    shapes_.push_back(a.shape());
    dtypes_.push_back(a.dtype());
  }
  tape_ = std::move(tape);
}

std::vector<mx::array> Program::operator()(const std::vector<mx::array>& inputs) const {
  require(inputs.size() == tape_->input_shapes.size(),
          "program: traced with " + std::to_string(tape_->input_shapes.size()) +
              " inputs, called with " + std::to_string(inputs.size()));
  for (size_t i = 0; i < inputs.size(); i++)
    require(inputs[i].shape() == tape_->input_shapes[i],
            "program: input " + std::to_string(i) + " has shape " + text(inputs[i].shape()) +
                ", traced with " + text(tape_->input_shapes[i]));
  return mx::array::make_arrays(shapes_, dtypes_, std::make_shared<Replay>(cpu_stream(), tape_),
                                inputs);
}

}  // namespace qrun
