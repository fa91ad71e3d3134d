#include "bindings/dlpack.h"

#include <array>
#include <cstdint>
#include <utility>

namespace shardcomm::bindings {
namespace {

// The structures of DLPack's stable C interface, before its versions:
// https://dmlc.github.io/dlpack/latest/c_api.html
struct Device {
  std::int32_t type;
  std::int32_t id;
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

constexpr Device kHost{1, 0};
constexpr DataType kBytes{1, 8, 1};  // of unsigned integers

struct Lent {
  ManagedTensor managed;
  std::array<std::int64_t, 1> shape;
  std::array<std::int64_t, 1> strides{1};
  std::shared_ptr<void> owner;
};

void give_back(ManagedTensor* managed) {
  const std::unique_ptr<Lent> lent(static_cast<Lent*>(managed->context));
}

// Of a capsule that nobody has made a tensor of: who does renames it.
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
