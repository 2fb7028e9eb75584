#include "op.h"

#include <cstring>

#include "mlx/backend/common/utils.h"

namespace qrun {

const char* dense(const mx::array& a, mx::Stream s) {
  if (a.flags().row_contiguous) return a.data<char>();
  char* copy = static_cast<char*>(scratch(a.nbytes(), s));
  enqueue(s, [src = a.data<char>(), copy, shape = a.shape(), strides = a.strides(), size = a.size(),
              item = a.itemsize()] {
    for (size_t i = 0; i < size; i++)
      std::memcpy(copy + i * item, src + mx::elem_to_loc(i, shape, strides) * item, item);
  });
  return copy;
}

}  // namespace qrun
