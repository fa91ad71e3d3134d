// The Python extension shardcomm._C. It translates and does nothing else; each concept has one
// file.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"

namespace py = pybind11;

namespace shardcomm::bindings {

// Python gives addresses as numbers.
inline void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

inline Epilogue epilogue_of(DType dtype, float scale, bool accumulate, std::uintptr_t nonfinite) {
  return {dtype, scale, accumulate, static_cast<std::int32_t*>(pointer(nonfinite))};
}

void bind_comm_error(py::module_& m);
void bind_layout(py::module_& m);
void bind_copy(py::module_& m);
void bind_blocks(py::module_& m);
void bind_ending(py::module_& m);
void bind_stream(py::module_& m);
void bind_comm(py::module_& m);
void bind_bound_collectives(py::module_& m);
void bind_tensor_calls(py::module_& m);
void bind_hosts(py::module_& m);
void bind_nccl(py::module_& m);
void bind_stacks(py::module_& m);

}  // namespace shardcomm::bindings
