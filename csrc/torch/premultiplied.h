// ReduceOp.PREMUL_SUM, which torch has for NCCL: a sum of what each rank has multiplied by a
// factor. FSDP2 reduces by it after set_gradient_divide_factor. Here the products are made when the
// collective is called, and summed as any other tensors, also by Gloo.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "calls.h"

namespace shardcomm_torch {

template <class Options>
bool is_premultiplied(const Options& opts) {
  return opts.reduceOp == c10d::ReduceOp::PREMUL_SUM;
}

template <class Options>
Options summing(Options opts) {
  opts.reduceOp = c10d::ReduceOp::SUM;
  return opts;
}

inline double premultiplied_factor(const char* operation, const c10d::ReduceOp& op) {
  const auto* given = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (given == nullptr) {
    refuse(operation, ": op is PREMUL_SUM without a factor; give it one, as PREMUL_SUM(0.5)");
  }
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>()
                                        : given->double_factor;
}

// New tensors: `tensors` times the factor of `op`.
inline Tensors products(const char* operation, const Tensors& tensors, const c10d::ReduceOp& op) {
  const double factor = premultiplied_factor(operation, op);
  const c10::InferenceMode mode;  // as in Flat
  Tensors multiplied;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_sparse()) {
      refuse(operation, ": op is PREMUL_SUM and a tensor is sparse; multiply it, and sum by SUM");
    }
    if (!c10::isFloatingType(tensor.scalar_type()) && !c10::isComplexType(tensor.scalar_type())) {
      refuse(operation, ": op is PREMUL_SUM and dtype is ", tensor.scalar_type(),
             "; accepted are floating-point and complex numbers");
    }
    multiplied.push_back(tensor.detach().mul(factor));
  }
  return multiplied;
}

// Writes the products into `tensors`. All are made first, since tensors may share memory.
inline void multiply(const char* operation, const Tensors& tensors, const c10d::ReduceOp& op) {
  const Tensors multiplied = products(operation, tensors, op);
  const c10::InferenceMode mode;
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].detach().copy_(multiplied[i]);
}

}  // namespace shardcomm_torch
