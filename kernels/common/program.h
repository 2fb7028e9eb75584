// A traced function, replayed as one primitive.
#pragma once

#include "op.h"

namespace qrun {

class Program {
 public:
  // outputs were computed from inputs and have not been evaluated. Whatever else they use is
  // constant, or memory that ops write in place. Throws where an op is not one of ours.
  Program(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs);

  // The same function of other inputs of the same shapes. Not before `after` has been computed:
  // memory that ops write in place makes no edge in MLX's graph, so the caller names one.
  std::vector<mx::array> operator()(const std::vector<mx::array>& inputs,
                                    const std::vector<mx::array>& after) const;

  struct Tape;

 private:
  std::shared_ptr<const Tape> tape_;
};

}  // namespace qrun
