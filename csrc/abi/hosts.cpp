// Groups of several hosts, in C.
#include "shardcomm/hosts.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "shardcomm.h"
#include "stream/fork.h"

using shardcomm::Across;
using shardcomm::abi::checked;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over;
using shardcomm::abi::options_of;
using shardcomm::abi::required;

namespace {

void join(shc_comm** comm, shc_comm* on_host, std::unique_ptr<Across> across, int host, int hosts) {
  shc_comm*& result = required(comm, "comm");
  const shc_comm& known = checked(on_host, "on_host");
  hand_over(result,
            std::make_unique<shc_comm>(
                shardcomm::make_hosts(known.comm, std::move(across), host, hosts), known.device));
}

// What a C program's functions do.
class Functions final : public Across {
 public:
  explicit Functions(const shc_across& given) : given_(given) {}
  ~Functions() override {
    if (given_.destroy != nullptr && shardcomm::forks() == forks_) given_.destroy(given_.context);
  }
  Functions(const Functions&) = delete;
  Functions& operator=(const Functions&) = delete;

  void all_gather(int channel, const void* send, void* recv, std::size_t bytes) override {
    call("all_gather", [&](char* error) {
      return given_.all_gather(given_.context, channel, send, recv, bytes, error);
    });
  }
  void all_to_all(int channel, const void* send, void* recv, std::size_t bytes) override {
    call("all_to_all", [&](char* error) {
      return given_.all_to_all(given_.context, channel, send, recv, bytes, error);
    });
  }
  void broadcast(int channel, void* buffer, std::size_t bytes, int root) override {
    call("broadcast", [&](char* error) {
      return given_.broadcast(given_.context, channel, buffer, bytes, root, error);
    });
  }
  void leave() noexcept override {
    if (given_.leave != nullptr) given_.leave(given_.context);
  }

 private:
  template <class Function>
  static void call(const char* name, Function&& function) {
    char error[256] = "";
    const int status = function(error);
    if (status == 0) return;
    error[sizeof(error) - 1] = '\0';
    throw std::runtime_error(std::string("across->") + name + " returned " +
                             std::to_string(status) + (error[0] != '\0' ? ": " : "") + error);
  }

  const shc_across given_;
  const int forks_ = shardcomm::forks();
};

}  // namespace

shc_status shc_comm_init_hosts(shc_comm** comm, shc_comm* on_host, const shc_across* across,
                               int host, int hosts) {
  return guarded("shc_comm_init_hosts", [&] {
    const shc_across given =
        options_of("across", &required(across, "across"), shc_across SHC_ACROSS_INIT);
    required(given.all_gather, "across->all_gather");
    required(given.all_to_all, "across->all_to_all");
    required(given.broadcast, "across->broadcast");
    auto functions = std::make_unique<Functions>(given);
    join(comm, on_host, std::move(functions), host, hosts);
  });
}

shc_status shc_comm_init_hosts_over_sockets(shc_comm** comm, shc_comm* on_host, const int* sockets,
                                            int host, int hosts) {
  return guarded("shc_comm_init_hosts_over_sockets", [&] {
    const int* first = &required(sockets, "sockets");
    const std::vector<int> given(first, first + 2 * std::ptrdiff_t{std::max(hosts, 0)});
    join(comm, on_host, shardcomm::make_sockets(given, host, hosts), host, hosts);
  });
}
