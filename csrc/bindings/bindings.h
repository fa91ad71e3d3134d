// The Python extension shardcomm._C: translation, nothing else. One file per concept.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace shardcomm::bindings {

// Which device the host's memory is of: none, or, over a CUDA runtime that is played, a device of
// it. What runs on GPUs then runs on CPU tensors.
#ifdef SHARDCOMM_PLAYED_DEVICE
constexpr int kHostDevice = SHARDCOMM_PLAYED_DEVICE;
#else
constexpr int kHostDevice = -1;
#endif

void bind_comm_error(py::module_& m);
void bind_layout(py::module_& m);
void bind_copy(py::module_& m);
void bind_stream(py::module_& m);
void bind_comm(py::module_& m);
void bind_bound_collectives(py::module_& m);
void bind_nccl(py::module_& m);
void bind_stacks(py::module_& m);

}  // namespace shardcomm::bindings
