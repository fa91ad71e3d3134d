#include "bindings/bindings.h"
#include "bindings/host_device.h"
#include "shardcomm/cuda.h"
#include "shardcomm/dtype.h"
#include "shardcomm/error.h"
#include "shardcomm/reduce.h"

namespace shardcomm::bindings {

PYBIND11_MODULE(_C, m) {
  m.doc() = "shardcomm's compiled core: raw pointers in, raw pointers out";

  py::enum_<DType>(m, "DType")
      .value("u8", DType::u8)
      .value("i32", DType::i32)
      .value("i64", DType::i64)
      .value("f16", DType::f16)
      .value("bf16", DType::bf16)
      .value("f32", DType::f32)
      .value("f64", DType::f64);
  py::enum_<RedOp>(m, "RedOp")
      .value("sum", RedOp::sum)
      .value("avg", RedOp::avg)
      .value("max", RedOp::max)
      .value("min", RedOp::min)
      .value("exact_sum", RedOp::exact_sum)
      .value("exact_avg", RedOp::exact_avg);
  bind_comm_error(m);
  py::register_exception<CudaError>(m, "CudaError", PyExc_RuntimeError).attr("__doc__") =
      "CUDA or NCCL refused, or is not there. The text says which call refused, and why.";

  py::class_<CudaStatus>(m, "CudaStatus")
      .def_readonly("built", &CudaStatus::built)
      .def_readonly("available", &CudaStatus::available)
      .def_readonly("reason", &CudaStatus::reason)
      .def_readonly("devices", &CudaStatus::devices)
      .def_readonly("runtime_version", &CudaStatus::runtime_version)
      .def_readonly("driver_version", &CudaStatus::driver_version);
  m.def("cuda_status", &cuda_status);
  m.attr("cuda_built") = cuda_built();
  m.attr("host_device") = kHostDevice;

  bind_layout(m);
  bind_ending(m);
  bind_stream(m);  // first: others take a stream
  bind_copy(m);
  bind_blocks(m);
  bind_comm(m);
  bind_bound_collectives(m);
  bind_tensor_calls(m);
  bind_hosts(m);
  bind_nccl(m);
  bind_stacks(m);
}

}  // namespace shardcomm::bindings
