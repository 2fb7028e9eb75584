// A traced function, replayed as one primitive.
#pragma once

#include "op.h"

namespace qrun {

struct Tape;

class Program {
 public:
  // outputs were computed from inputs and have not been evaluated; what else they use is constant.
  Program(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs);

  // The same function of other inputs of the same shapes.
  std::vector<mx::array> operator()(const std::vector<mx::array>& inputs) const;

 private:
  std::shared_ptr<const Tape> tape_;
  std::vector<mx::Shape> shapes_;
  std::vector<mx::Dtype> dtypes_;
};

}  // namespace qrun
