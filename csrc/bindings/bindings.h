// The Python extension shardcomm._C. It translates and does nothing else; each concept has one
// file.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

namespace py = pybind11;

namespace shardcomm::bindings {

// The CUDA device that the host's memory counts as: none (-1), or a device of a played CUDA runtime
// where the build has one. With a played runtime, what runs on GPUs runs on CPU tensors.
#ifdef SHARDCOMM_PLAYED_DEVICE
constexpr int kHostDevice = SHARDCOMM_PLAYED_DEVICE;
#else
constexpr int kHostDevice = -1;
#endif

// Python gives addresses as numbers.
inline void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void bind_comm_error(py::module_& m);
void bind_layout(py::module_& m);
void bind_copy(py::module_& m);
void bind_blocks(py::module_& m);
void bind_ending(py::module_& m);
void bind_stream(py::module_& m);
void bind_comm(py::module_& m);
void bind_bound_collectives(py::module_& m);
void bind_hosts(py::module_& m);
void bind_nccl(py::module_& m);
void bind_stacks(py::module_& m);

}  // namespace shardcomm::bindings
