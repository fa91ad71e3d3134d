#include "shardcomm/nccl.h"

#include "bindings/bindings.h"
#include "bindings/interrupt.h"

namespace shardcomm::bindings {

void bind_nccl(py::module_& m) {
  py::class_<NcclStatus>(m, "NcclStatus")
      .def_readonly("available", &NcclStatus::available)
      .def_readonly("path", &NcclStatus::path)
      .def_readonly("version", &NcclStatus::version)
      .def_readonly("reason", &NcclStatus::reason)
      .def_readonly("missing", &NcclStatus::missing);

  m.def("nccl_status", &nccl_status, py::arg("paths") = std::vector<std::string>{},
        py::call_guard<WithoutLock>());
  m.def("nccl_unique_id", [] { return py::bytes(nccl_unique_id()); });
  py::enum_<CtaPolicy>(m, "CtaPolicy")
      .value("default", CtaPolicy::standard)
      .value("efficiency", CtaPolicy::efficiency)
      .value("zero", CtaPolicy::zero);
  m.def(
      "make_nccl",
      [](const py::bytes& unique_id, int rank, int size, int device, double deadline_s,
         CtaPolicy cta_policy) {
        const std::string id = unique_id;
        const InterruptibleWait scope;
        return destroyed_without_lock(
            make_nccl(id, rank, size, device, {deadline_s, cta_policy, ""}));
      },
      py::arg("unique_id"), py::arg("rank"), py::arg("size"), py::arg("device"),
      py::arg("deadline_s"), py::arg("cta_policy") = CtaPolicy::standard);
}

}  // namespace shardcomm::bindings
