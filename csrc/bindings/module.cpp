#include "bindings/bindings.h"
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
      .value("min", RedOp::min);
  py::register_exception<CommError>(m, "CommError", PyExc_RuntimeError);

  bind_layout(m);
  bind_stream(m);  // first: others take a stream
  bind_copy(m);
  bind_comm(m);
  bind_nccl(m);
}

}  // namespace shardcomm::bindings
