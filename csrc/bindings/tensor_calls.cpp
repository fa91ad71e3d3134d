// The usual collectives of small messages: of dense tensors in the host's memory, in equal parts,
// here and now. Python's checks of a tensor ask it seven questions, which together take longer than
// the collective itself. Here a tensor is read at once, by DLPack's exchange interface, and any
// that is not usual is left to Python, whose errors say what it is.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "bindings/interrupt.h"
#include "shardcomm/communicator.h"
#include "shardcomm/dtype.h"
#include "shardcomm/parts.h"
#include "shardcomm/reduce.h"

namespace shardcomm::bindings {
namespace {

using Comm = std::shared_ptr<Communicator>;

struct Operand {
  void* data;
  DType dtype;
  std::int64_t numel;
};

// torch.uint8 is not here, since DLPack describes torch.uint1 to torch.uint7 in the same way.
std::optional<DType> dtype_of(dlpack::DataType type) {
  if (type.lanes != 1) return std::nullopt;
  switch (type.code << 8 | type.bits) {
    case dlpack::kInt << 8 | 32:
      return DType::i32;
    case dlpack::kInt << 8 | 64:
      return DType::i64;
    case dlpack::kFloat << 8 | 16:
      return DType::f16;
    case dlpack::kBfloat << 8 | 16:
      return DType::bf16;
    case dlpack::kFloat << 8 | 32:
      return DType::f32;
    case dlpack::kFloat << 8 | 64:
      return DType::f64;
    default:
      return std::nullopt;
  }
}

// None if the elements do not lie side by side.
std::optional<std::int64_t> contiguous_numel(const dlpack::Tensor& tensor) {
  std::int64_t numel = 1;
  bool side_by_side = true;
  for (int dim = tensor.dims - 1; dim >= 0; --dim) {
    const std::int64_t length = tensor.shape[dim];
    side_by_side = side_by_side && (length == 1 || tensor.strides[dim] == numel);
    numel *= length;
  }
  if (numel != 0 && !side_by_side) return std::nullopt;
  return numel;
}

class TensorCalls {
 public:
  explicit TensorCalls(py::type tensor) : type_(std::move(tensor)) {
    const py::object api = py::getattr(type_, "__dlpack_c_exchange_api__", py::none());
    if (PyCapsule_IsValid(api.ptr(), "dlpack_exchange_api") == 0) return;
    const auto* table = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
    if (table->major == 1) read_ = table->read;
  }

  // Each returns whether the operands are usual ones, and the collective has run.
  bool all_gather(const Comm& comm, py::handle recv, py::handle send) const {
    const auto whole = operand(recv);
    const auto part = operand(send);
    if (!whole || !part || !consists_of(*whole, *part, *comm)) return false;
    run(Communicator::bind_all_gather(comm, part->data, part->dtype, whole->data, whole->dtype,
                                      Parts(part->numel), kTag));
    return true;
  }

  bool reduce_scatter(const Comm& comm, py::handle recv, py::handle send, RedOp op) const {
    const auto part = operand(recv);
    const auto whole = operand(send);
    if (!whole || !part || !consists_of(*whole, *part, *comm)) return false;
    const Epilogue epilogue{part->dtype, /*scale=*/1.0F, /*accumulate=*/false, nullptr};
    run(Communicator::bind_reduce_scatter(comm, whole->data, whole->dtype, part->data, epilogue,
                                          Parts(part->numel), op, kTag));
    return true;
  }

  bool all_reduce(const Comm& comm, py::handle buffer, RedOp op) const {
    const auto all = operand(buffer);
    if (!all) return false;
    run(Communicator::bind_all_reduce(comm, all->data, all->dtype, all->numel, op, kTag));
    return true;
  }

  bool broadcast(const Comm& comm, py::handle buffer, int root) const {
    const auto all = operand(buffer);
    if (!all) return false;
    run(Communicator::bind_broadcast(comm, all->data, all->dtype, all->numel, root));
    return true;
  }

 private:
  static constexpr std::int64_t kTag = 0;
  static constexpr std::uintptr_t kLeastAddress = std::uintptr_t{1} << 32;

  static bool consists_of(const Operand& whole, const Operand& part, const Communicator& comm) {
    return whole.numel % comm.size() == 0 && whole.numel / comm.size() == part.numel;
  }

  static void run(const Stream::Operation& collective) {
    const InterruptibleWait scope;
    collective(nullptr);
  }

  std::optional<Operand> operand(py::handle object) const {
    if (read_ == nullptr || py::type::handle_of(object).ptr() != type_.ptr()) return std::nullopt;
    dlpack::Tensor tensor;
    if (read_(object.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    if (tensor.device.type != dlpack::kHost) return std::nullopt;
    const auto dtype = dtype_of(tensor.dtype);
    const auto numel = contiguous_numel(tensor);
    if (!dtype || !numel || is_negated(object)) return std::nullopt;
    // Values that are nowhere: torch adds a view's offset to the null of memory that was freed.
    if (reinterpret_cast<std::uintptr_t>(tensor.data) < kLeastAddress && *numel != 0) {
      return std::nullopt;
    }
    return Operand{static_cast<char*>(tensor.data) + tensor.byte_offset, *dtype, *numel};
  }

  // DLPack does not tell of torch's views that negate what is in memory when they are read.
  bool is_negated(py::handle tensor) const {
    const auto answer =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), is_neg_.ptr()));
    if (!answer) throw py::error_already_set();
    return !answer.is(py::bool_(false));
  }

  py::type type_;
  py::str is_neg_ = py::str("is_neg");
  int (*read_)(void* object, dlpack::Tensor* tensor) = nullptr;
};

}  // namespace

void bind_tensor_calls(py::module_& m) {
  py::class_<TensorCalls>(m, "TensorCalls")
      .def(py::init<py::type>(), py::arg("tensor"))
      .def("all_gather", &TensorCalls::all_gather, py::arg("comm"), py::arg("recv"),
           py::arg("send"))
      .def("reduce_scatter", &TensorCalls::reduce_scatter, py::arg("comm"), py::arg("recv"),
           py::arg("send"), py::arg("op"))
      .def("all_reduce", &TensorCalls::all_reduce, py::arg("comm"), py::arg("buffer"),
           py::arg("op"))
      .def("broadcast", &TensorCalls::broadcast, py::arg("comm"), py::arg("buffer"),
           py::arg("root"));
}

}  // namespace shardcomm::bindings
