// CommError as Python raises it: a RuntimeError, with what programs ask for as attributes.
#include <exception>

#include "bindings/bindings.h"
#include "shardcomm/error.h"

namespace shardcomm::bindings {
namespace {

PYBIND11_CONSTINIT py::gil_safe_call_once_and_store<py::object> comm_error;

void set_fields(const py::object& error, const CommFault& fault) {
  const auto rank_or_none = [](int rank) -> py::object {
    return rank == CommFault::kNobody ? py::none() : py::object(py::int_(rank));
  };
  error.attr("kind") = fault.kind;
  error.attr("rank") = rank_or_none(fault.rank);
  const bool in_call = !fault.operation.empty();
  error.attr("operation") = in_call ? py::object(py::str(fault.operation)) : py::none();
  error.attr("sequence") = in_call ? py::object(py::int_(fault.sequence)) : py::none();
  error.attr("reporter") = rank_or_none(fault.reporter);
}

}  // namespace

void bind_comm_error(py::module_& m) {
  comm_error.call_once_and_store_result([&] {
    py::object type = py::exception<CommError>(m, "CommError", PyExc_RuntimeError);
    set_fields(type, {});  // of one that is raised without them
    return type;
  });
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CommError& error) {
      const py::object& type = comm_error.get_stored();
      const py::object raised = type(error.what());
      set_fields(raised, error.fault());
      PyErr_SetObject(type.ptr(), raised.ptr());
    }
  });
}

}  // namespace shardcomm::bindings
