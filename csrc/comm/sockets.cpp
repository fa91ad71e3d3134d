#include "comm/sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "stream/fork.h"

namespace shardcomm {
namespace {

constexpr int kChannels = 2;

// Probes keep an idle connection known to what forgets such ones on the way. They also notice after
// two minutes that the host of an idle connection has ended without a word.
constexpr int kIdleS = 60, kBetweenProbesS = 10, kProbes = 6;

// The descriptors of all sockets. A forked child closes its copies: while it kept them, other hosts
// would not hear of this process's end.
struct Descriptors {
  std::mutex mutex;
  std::set<int> open;
};

// Never destroyed: a socket may outlive what is destroyed while the process ends.
Descriptors& descriptors() {
  static Descriptors& only = *new Descriptors;
  return only;
}

void close_in_child() {
  for (const int fd : descriptors().open) close(fd);
  descriptors().open.clear();
  descriptors().mutex.unlock();
}

const bool closing_in_children = [] {
  at_fork([] { descriptors().mutex.lock(); }, [] { descriptors().mutex.unlock(); }, close_in_child);
  return true;
}();

std::string words_of(int error) { return std::generic_category().message(error); }

// Throws unless `fd` is a stream socket with another end.
void check_connected(int fd, std::size_t index) {
  int type = 0;
  socklen_t length = sizeof(type);
  sockaddr_storage peer{};
  socklen_t peer_length = sizeof(peer);
  std::string trouble;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) {
    trouble = words_of(errno);
  } else if (type != SOCK_STREAM) {
    trouble = "not a stream";
  }
  if (trouble.empty()) return;
  throw std::invalid_argument("sockets[" + std::to_string(index) + "] is " + std::to_string(fd) +
                              ", which is no connected stream socket: " + trouble);
}

std::byte* at(void* data, std::size_t bytes, int index) {
  return static_cast<std::byte*>(data) + bytes * static_cast<std::size_t>(index);
}

const std::byte* at(const void* data, std::size_t bytes, int index) {
  return static_cast<const std::byte*>(data) + bytes * static_cast<std::size_t>(index);
}

}  // namespace

std::unique_ptr<Across> make_sockets(std::vector<int> sockets, int host, int hosts) {
  if (hosts < 2 || host < 0 || host >= hosts) {
    throw std::invalid_argument("host is " + std::to_string(host) + " of " + std::to_string(hosts) +
                                "; there must be at least 2, numbered from 0 on");
  }
  if (sockets.size() != static_cast<std::size_t>(kChannels) * static_cast<std::size_t>(hosts)) {
    throw std::invalid_argument("sockets has " + std::to_string(sockets.size()) +
                                " entries; it must have " + std::to_string(kChannels * hosts) +
                                ": one for each host, on each of two channels");
  }
  std::set<int> seen;
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    if (static_cast<int>(i) % hosts == host) continue;
    check_connected(sockets[i], i);
    if (!seen.insert(sockets[i]).second) {
      throw std::invalid_argument("sockets[" + std::to_string(i) + "] is " +
                                  std::to_string(sockets[i]) +
                                  ", as another entry is; each channel to each host needs its own");
    }
  }
  return std::make_unique<Sockets>(std::move(sockets), host, hosts);
}

Sockets::Sockets(std::vector<int> sockets, int host, int hosts)
    : sockets_(std::move(sockets)), host_(host), hosts_(hosts) {
  // What a socket of another kind than TCP's does not have, it does without.
  const auto set = [](int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value));
  };
  const std::lock_guard<std::mutex> lock(descriptors().mutex);
  for (const int fd : others()) {
    // A greeting is not held back until the one before has been acknowledged.
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kBetweenProbesS);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
    descriptors().open.insert(fd);
  }
}

// In a forked child they are closed already, and their numbers may be other files'.
Sockets::~Sockets() {
  if (forks() != forks_) return;
  const std::lock_guard<std::mutex> lock(descriptors().mutex);
  for (const int fd : others()) {
    descriptors().open.erase(fd);
    close(fd);
  }
}

std::vector<int> Sockets::others() const {
  std::vector<int> all;
  for (int i = 0; i < kChannels * hosts_; ++i) {
    if (i % hosts_ != host_) all.push_back(sockets_[static_cast<std::size_t>(i)]);
  }
  return all;
}

int Sockets::socket_to(int channel, int host) const {
  return sockets_[static_cast<std::size_t>(channel * hosts_ + host)];
}

void Sockets::all_gather(int channel, const void* send, void* recv, std::size_t bytes) {
  std::vector<Flow> flows;
  for (int host = 0; host < hosts_; ++host) {
    if (host == host_) continue;
    flows.push_back({host, socket_to(channel, host), static_cast<const std::byte*>(send), bytes,
                     at(recv, bytes, host), bytes, nullptr});
  }
  std::memcpy(at(recv, bytes, host_), send, bytes);
  run(flows);
}

void Sockets::all_to_all(int channel, const void* send, void* recv, std::size_t bytes) {
  std::vector<Flow> flows;
  for (int host = 0; host < hosts_; ++host) {
    if (host == host_) continue;
    flows.push_back({host, socket_to(channel, host), at(send, bytes, host), bytes,
                     at(recv, bytes, host), bytes, nullptr});
  }
  std::memcpy(at(recv, bytes, host_), at(send, bytes, host_), bytes);
  run(flows);
}

void Sockets::broadcast(int channel, void* buffer, std::size_t bytes, int root) {
  auto* data = static_cast<std::byte*>(buffer);
  const int before = (host_ + hosts_ - 1) % hosts_;
  const int after = (host_ + 1) % hosts_;
  std::vector<Flow> flows(2);
  Flow& from = flows[0];
  Flow& to = flows[1];
  from = {before, socket_to(channel, before), nullptr, 0, data, host_ == root ? 0 : bytes, nullptr};
  to = {after, socket_to(channel, after), data, after == root ? 0 : bytes, nullptr, 0, &from};
  run(flows);
}

void Sockets::leave() noexcept {
  left_.store(true);
  for (int i = 0; i < kChannels * hosts_; ++i) {
    if (i % hosts_ != host_) shutdown(sockets_[static_cast<std::size_t>(i)], SHUT_RDWR);
  }
}

void Sockets::run(std::vector<Flow>& flows) const {
  std::vector<pollfd> waiting(flows.size());
  while (true) {
    bool unfinished = false;
    for (std::size_t i = 0; i < flows.size(); ++i) {
      const Flow& flow = flows[i];
      const int events = (flow.ready() > 0 ? POLLOUT : 0) | (flow.to_receive > 0 ? POLLIN : 0);
      waiting[i] = {events != 0 ? flow.fd : -1, static_cast<short>(events), 0};
      unfinished |= flow.to_send > 0 || flow.to_receive > 0;
    }
    if (!unfinished) return;
    if (poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) {
      throw std::runtime_error("poll: " + words_of(errno));
    }
    for (std::size_t i = 0; i < flows.size(); ++i) {
      // An end of the connection shows in whatever is tried next.
      if (waiting[i].revents == 0) continue;
      if (flows[i].to_receive > 0) receive_some(flows[i]);
      if (flows[i].ready() > 0) send_some(flows[i]);
    }
  }
}

void Sockets::send_some(Flow& flow) const {
  const ssize_t sent = ::send(flow.fd, flow.send, flow.ready(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    fail(flow, "send to");
  }
  flow.send += sent;
  flow.to_send -= static_cast<std::size_t>(sent);
}

void Sockets::receive_some(Flow& flow) const {
  const ssize_t received = ::recv(flow.fd, flow.recv, flow.to_receive, MSG_DONTWAIT);
  if (received < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    fail(flow, "receive from");
  }
  if (received == 0) fail(flow, nullptr);
  flow.recv += received;
  flow.to_receive -= static_cast<std::size_t>(received);
}

void Sockets::fail(const Flow& flow, const char* what) const {
  const int error = errno;
  if (left_.load()) throw std::runtime_error("this rank has left them");
  const std::string host = "host " + std::to_string(flow.host);
  if (what == nullptr) throw std::runtime_error(host + " has closed the connection");
  throw std::runtime_error(std::string(what) + " " + host + ": " + words_of(error));
}

}  // namespace shardcomm
