// The inner loops: conversion of runs of elements and their reduction. Compiled once per instruction set; the best
// one the processor has is taken at run time, so that one binary fits all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"

namespace shardcomm {

struct Kernels {
  // As memcpy, past the caches: for copies so large that what they replace there is worth more.
  void (*stream)(void* dst, const void* src, std::size_t bytes);
  // dst[i] = convert(scale * src[i]) (+ dst[i]); src and dst are f32, bf16 or f16.
  void (*convert)(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
                  float scale, bool accumulate);
  // As reduce_cpu.
  void (*reduce)(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, std::int64_t count);
};

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;    // AVX2, F16C
extern const Kernels kAvx512Kernels;  // AVX-512 F, BW, VL, DQ
#endif

const Kernels& kernels();

}  // namespace shardcomm
