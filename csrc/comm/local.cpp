// `local`: N ranks as threads of one process.
#include "comm/local.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "comm/board_communicator.h"

namespace shardcomm {
namespace {

class LocalProvider final : public WindowProvider {
 public:
  explicit LocalProvider(const LocalPlace& place) : place_(place) {}

  std::shared_ptr<void> create(std::size_t bytes, std::uint64_t* handle) override {
    auto made = std::make_shared<std::shared_ptr<Mapping>>(place_.allocate(bytes));
    *handle = reinterpret_cast<std::uint64_t>(made.get());
    return made;
  }
  std::shared_ptr<Mapping> open(std::uint64_t handle, std::size_t) override {
    return *reinterpret_cast<const std::shared_ptr<Mapping>*>(handle);
  }
  bool shares_addresses() const override { return true; }

 private:
  LocalPlace place_;
};

LocalPlace place_on_host() {
  return {&Mapping::anonymous, [](int) { return make_host_executor(); }};
}

}  // namespace

std::vector<std::shared_ptr<Communicator>> make_local_group(int size, const CommOptions& options,
                                                            int device) {
  if (size < 1) {
    throw std::invalid_argument("local group: size is " + std::to_string(size) +
                                "; it must be at least 1");
  }
  if (options.exact_sums && device >= 0) {
    throw std::invalid_argument(
        "local group: exact sums are of memory of the host, and device is " +
        std::to_string(device) + "; give -1, the CPU");
  }
  const LocalPlace place = device < 0 ? place_on_host() : place_on_device(device, size);
  const std::shared_ptr<Mapping> control = Mapping::anonymous(ControlMemory::bytes(size));
  std::vector<std::shared_ptr<Communicator>> group;
  for (int rank = 0; rank < size; ++rank) {
    group.push_back(std::make_shared<BoardCommunicator>(
        "local", rank, size, options, control, std::make_unique<LocalProvider>(place),
        place.executor(rank), [](int) { return false; }));
  }
  return group;
}

}  // namespace shardcomm
