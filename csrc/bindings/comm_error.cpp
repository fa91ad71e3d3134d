// CommError as Python raises it: a RuntimeError, with what programs ask for as attributes.
#include <exception>

#include "bindings/bindings.h"
#include "shardcomm/error.h"

namespace shardcomm::bindings {
namespace {

constexpr const char* kDoc =
    R"(A group of ranks cannot go on: one died, came late, or called something else. It is raised on every rank.

People read its text, and programs read its fields. After it the communicator only raises.

Attributes:
    kind: "died", "late", "mismatch" (ranks called different collectives, or wait for each other),
        "closed", "aborted" (a rank gave up, by an exception or by `abort`), or "backend" (the
        transport, the operating system, or something that set-up needs refused).
    rank: The rank whose fault it is; None where it is no single rank's fault, or not known.
    operation: The collective that this rank was in, "all_gather" for instance; None: in none.
    sequence: The number of that collective, which the text gives as "#147"; None: in none.
    reporter: The rank that noticed; None where that is not known.
)";

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
    type.attr("__doc__") = kDoc;
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
