// The functions that every instruction set compiles; Kernels in types.h says what they take.
#pragma once
#include "types.h"

namespace qrun::QRUN_NS {

void prepare(const Prologue&, const Digits&, int tile0, int tile1);
void prepare_terms(const Prologue&, const Digits&, int tile0, int tile1);
void prepare_panels(const Prologue&, const Digits&, int tile0, int tile1);
void product(const Matrix&, const Digits&, const Epilogue&, int block0, int block1, int tile0,
             int tile1);
void product_fp8(const Matrix&, const Digits&, const Epilogue&, int block0, int block1, int tile0,
                 int tile1);
void product_panels(const Matrix&, const Digits&, const Epilogue&, int block0, int block1,
                    int tile0, int tile1);
// Null where the instruction set has no matrix unit.
using ProductTiled = void (*)(const Matrix&, const Digits&, const Epilogue&, int, int, int, int);
extern const ProductTiled product_tiled, product_few;
void combine(const Combine&, int row0, int row1);
void gemm(const Gemm&, int n0, int n1);
void rms_norm(const RmsNorm&, int row0, int row1);
void rope(const Rope&, int item0, int item1);
void sdpa_turn(const Sdpa&, int item0, int item1);
void sdpa(const Sdpa&, int item0, int item1);
void sdpa_merge(const Sdpa&, int item0, int item1);
void embedding(const Matrix&, const void* ids, bool wide_ids, void* y, Type type, float scale,
               int row0, int row1);
void swiglu(const void* gate_up, void* y, Type type, size_t i0, size_t i1);
void softcap(const void* x, void* y, Type type, float limit, size_t i0, size_t i1);
uint32_t argmax(const void* x, Type type, int n);
void read(const void* p, size_t bytes);
double peak(int kind, long rounds);

}  // namespace qrun::QRUN_NS
