// Groups that a group makes.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace shardcomm_torch {

// Python makes it, as it does for init_process_group and new_group. Collective among its ranks.
inline c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout) {
  namespace py = pybind11;
  const py::gil_scoped_acquire lock;
  const py::object make = py::module_::import("shardcomm.interop.backend").attr("make_group");
  return make(store, rank, size, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
}

}  // namespace shardcomm_torch
