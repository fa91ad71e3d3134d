#include "comm/sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace shardcomm {
namespace {

constexpr int kChannels = 2;

std::string words_of(int error) { return std::generic_category().message(error); }

// The error that a stream socket with another end does not have.
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
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    if (static_cast<int>(i) % hosts != host) check_connected(sockets[i], i);
  }
  return std::make_unique<Sockets>(std::move(sockets), host, hosts);
}

Sockets::Sockets(std::vector<int> sockets, int host, int hosts)
    : sockets_(std::move(sockets)), host_(host), hosts_(hosts) {
  const int at_once = 1;  // a greeting is not held back until the one before has been acknowledged
  for (const int fd : sockets_) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof(at_once));
}

Sockets::~Sockets() {
  for (int i = 0; i < kChannels * hosts_; ++i) {
    if (i % hosts_ != host_) close(sockets_[static_cast<std::size_t>(i)]);
  }
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
    fail(flow, "send");
  }
  flow.send += sent;
  flow.to_send -= static_cast<std::size_t>(sent);
}

void Sockets::receive_some(Flow& flow) const {
  const ssize_t received = ::recv(flow.fd, flow.recv, flow.to_receive, MSG_DONTWAIT);
  if (received < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    fail(flow, "recv");
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
  throw std::runtime_error(std::string(what) + " to " + host + ": " + words_of(error));
}

}  // namespace shardcomm
