// What Python raises for an error of the C library, whichever of torch's functions it leaves.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "shardcomm.hpp"

namespace shardcomm_torch {

namespace py = pybind11;

// `function` of shardcomm.interop.backend for the fields of `error`.
inline py::object made_of(const shc::Error& error, const char* function) {
  return py::module_::import("shardcomm.interop.backend")
      .attr(function)(static_cast<int>(error.status()), error.what(), error.kind(), error.rank(),
                      error.operation(), error.sequence(), error.reporter());
}

// How a collective failed. It holds nothing of Python's, so that any thread may throw and drop it.
//
// The autograd engine, in which DDP waits, runs no translators of pybind11's. It catches
// torch::PyTorchError, calls the type that `python_type()` returns with the text, and raises the
// result.
class Failed final : public torch::PyTorchError {
 public:
  explicit Failed(shc::Error error) : torch::PyTorchError(error.what()), error_(std::move(error)) {}

  PyObject* python_type() override {
    try {
      // Torch takes no reference, so one leaks.
      return made_of(error_, "type_of_error").release().ptr();
    } catch (py::error_already_set& trouble) {
      trouble.discard_as_unraisable("a failed collective");
      return PyExc_RuntimeError;
    }
  }

  // Sets Python's error.
  void raise() const {
    const py::object error = made_of(error_, "error_of");
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  }

 private:
  shc::Error error_;
};

}  // namespace shardcomm_torch
