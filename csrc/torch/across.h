// What Gloo carries between hosts for the C library.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "deadline.h"
#include "shardcomm.hpp"

namespace shardcomm_torch {

// Two Gloo groups of the ranks with one index on their hosts, one a channel. Nobody else has them,
// so that to let go of them closes their connections, of which the other hosts hear.
class GlooAcross {
 public:
  using Gloo = c10::intrusive_ptr<c10d::Backend>;

  // Makes this rank's communicator in the group of all hosts. Takes over `on_host`.
  static shc_comm* join(shc_comm* on_host, Gloo gathers, Gloo reduces, int host, int hosts) {
    const std::unique_ptr<shc_comm, void (*)(shc_comm*)> owner(on_host, shc_comm_destroy);
    shc_across across = SHC_ACROSS_INIT;
    across.context = new_context(std::move(gathers), std::move(reduces));
    across.all_gather = all_gather;
    across.all_to_all = all_to_all;
    across.broadcast = broadcast;
    across.leave = leave;
    across.destroy = destroy;
    shc_comm* comm = nullptr;
    shc::check(shc_comm_init_hosts(&comm, on_host, &across, host, hosts));
    return comm;
  }

 private:
  GlooAcross(Gloo gathers, Gloo reduces) : groups_{std::move(gathers), std::move(reduces)} {}

  // Whoever calls it must call `destroy` at the end.
  static GlooAcross* new_context(Gloo gathers, Gloo reduces) {
    return std::unique_ptr<GlooAcross>(new GlooAcross(std::move(gathers), std::move(reduces)))
        .release();
  }
  static GlooAcross& of(void* context) { return *static_cast<GlooAcross*>(context); }
  static void destroy(void* context) {
    const std::unique_ptr<GlooAcross> owner(static_cast<GlooAcross*>(context));
  }

  static int all_gather(void* context, int channel, const void* send, void* recv, std::size_t bytes,
                        char* error) {
    return status_of(error, [&] {
      const Gloo group = of(context).group(channel);
      at::Tensor input = tensor(const_cast<void*>(send), bytes);
      at::Tensor output = tensor(recv, bytes * static_cast<std::size_t>(group->getSize()));
      group->_allgather_base(output, input, timed<c10d::AllgatherOptions>())->wait();
    });
  }

  static int all_to_all(void* context, int channel, const void* send, void* recv, std::size_t bytes,
                        char* error) {
    return status_of(error, [&] {
      const Gloo group = of(context).group(channel);
      const std::size_t total = bytes * static_cast<std::size_t>(group->getSize());
      at::Tensor input = tensor(const_cast<void*>(send), total);
      at::Tensor output = tensor(recv, total);
      std::vector<std::int64_t> even;
      group->alltoall_base(output, input, even, even, timed<c10d::AllToAllOptions>())->wait();
    });
  }

  static int broadcast(void* context, int channel, void* buffer, std::size_t bytes, int root,
                       char* error) {
    return status_of(error, [&] {
      const Gloo group = of(context).group(channel);
      auto options = timed<c10d::BroadcastOptions>();
      options.rootRank = root;
      std::vector<at::Tensor> tensors{tensor(buffer, bytes)};
      group->broadcast(tensors, options)->wait();
    });
  }

  static void leave(void* context) {
    std::array<Gloo, 2> dropped;  // destroyed after the lock
    const std::lock_guard<std::mutex> lock(of(context).mutex_);
    dropped.swap(of(context).groups_);
  }

  // A group that is in use outlives `leave`.
  Gloo group(int channel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Gloo group = groups_.at(static_cast<std::size_t>(channel));
    if (!group) throw std::runtime_error("this rank has left them");
    return group;
  }

  // Options by which Gloo waits as long as the call for which it carries.
  template <class Options>
  static Options timed() {
    Options options;
    options.timeout = thread_timeout();
    return options;
  }

  static at::Tensor tensor(void* data, std::size_t bytes) {
    return at::from_blob(data, {static_cast<std::int64_t>(bytes)}, at::kByte);
  }

  // What a function of shc_across returns for `call`: no exception reaches the C library.
  template <class Call>
  static int status_of(char* error, Call&& call) {
    try {
      call();
      return 0;
    } catch (const std::exception& thrown) {
      std::snprintf(error, 256, "%s", thrown.what());
    } catch (...) {  // none of C++'s own: the C library has a sentence without it
    }
    return 1;
  }

  std::mutex mutex_;
  std::array<Gloo, 2> groups_;
};

}  // namespace shardcomm_torch
