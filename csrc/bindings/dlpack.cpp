#include "bindings/dlpack.h"

#include <array>
#include <cstdint>
#include <utility>

namespace shardcomm::bindings {
namespace {

// Before DLPack had versions, which torch.from_dlpack takes as well.
struct ManagedTensor {
  dlpack::Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

constexpr dlpack::Device kHost{dlpack::kHost, 0};
constexpr dlpack::DataType kBytes{dlpack::kUnsigned, 8, 1};

struct Lent {
  ManagedTensor managed;
  std::array<std::int64_t, 1> shape;
  std::array<std::int64_t, 1> strides{1};
  std::shared_ptr<void> owner;
};

void give_back(ManagedTensor* managed) {
  const std::unique_ptr<Lent> lent(static_cast<Lent*>(managed->context));
}

// A capsule's destructor. Whoever makes a tensor of a capsule renames it, and keeps the memory.
void drop(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  give_back(static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

}  // namespace

py::capsule as_dlpack(void* data, std::size_t bytes, std::shared_ptr<void> owner) {
  auto lent = std::make_unique<Lent>();
  lent->shape = {static_cast<std::int64_t>(bytes)};
  lent->owner = std::move(owner);
  lent->managed = {{data, kHost, 1, kBytes, lent->shape.data(), lent->strides.data(), 0},
                   lent.get(),
                   &give_back};
  py::capsule capsule(&lent->managed, "dltensor", &drop);
  static_cast<void>(lent.release());
  return capsule;
}

}  // namespace shardcomm::bindings
