// One instruction set's functions, as a table that dispatch.cpp can choose.
#include "kernels.h"
#include "vec.h"

#define QRUN_STRING2(x) #x
#define QRUN_STRING(x) QRUN_STRING2(x)

namespace qrun::QRUN_NS {

extern const Kernels table;
const Kernels table = {
    QRUN_STRING(QRUN_NS),
    {kMaxTile[0], kMaxTile[1], kMaxTile[2], kMaxTile[3]},
    prepare,
    product,
    product_panels,
    kPanelsFrom,
    kFastDots,
    product_tiled,
    product_few,
    combine,
    gemm,
    rms_norm,
    rope,
    sdpa_turn,
    sdpa,
    sdpa_merge,
    embedding,
    swiglu,
    softcap,
    argmax,
    read,
    peak,
};

}  // namespace qrun::QRUN_NS
