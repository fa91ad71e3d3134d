// What crosses between hosts by TCP: each rank has connected sockets to its counterparts.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "shardcomm/hosts.h"
#include "stream/fork.h"

namespace shardcomm {

// A sender does not wait for its receivers: the kernel takes bytes as long as it has room for them.
class Sockets final : public Across {
 public:
  // As make_sockets in hosts.h.
  Sockets(std::vector<int> sockets, int host, int hosts);
  ~Sockets() override;
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  // With all other hosts at once.
  void all_gather(int channel, const void* send, void* recv, std::size_t bytes) override;
  void all_to_all(int channel, const void* send, void* recv, std::size_t bytes) override;
  // From host to host, so that each byte leaves a host once; each passes on what has come so far.
  void broadcast(int channel, void* buffer, std::size_t bytes, int root) override;
  void leave() noexcept override;

 private:
  // What goes to another host and comes from it in one call.
  struct Flow {
    int host;
    int fd;
    const std::byte* send;
    std::size_t to_send;
    std::byte* recv;
    std::size_t to_receive;
    // What is sent has to come from there first; null: it is here.
    const Flow* source;

    // The bytes that can be sent now.
    std::size_t ready() const {
      const std::size_t lacking = source == nullptr ? 0 : source->to_receive;
      return to_send > lacking ? to_send - lacking : 0;
    }
  };

  int socket_to(int channel, int host) const;
  std::vector<int> others() const;  // the sockets, without the entries of this host
  // Returns when everything is sent and received.
  void run(std::vector<Flow>& flows) const;
  void send_some(Flow& flow) const;
  void receive_some(Flow& flow) const;
  [[noreturn]] void fail(const Flow& flow, const char* what) const;

  const std::vector<int> sockets_;  // channel * hosts + host
  const int host_;
  const int hosts_;
  const int forks_ = forks();
  std::atomic<bool> left_{false};
};

}  // namespace shardcomm
