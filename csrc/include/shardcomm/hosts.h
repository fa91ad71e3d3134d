// Collectives of several hosts with equally many ranks each. On a host the ranks share memory;
// between hosts each rank leads for the ranks with its own index on the other hosts, through
// sockets, or whatever the caller has there, such as MPI.
//
//   host A: ranks 0 1 2     0 and 3 exchange the bytes that ranks 0 and 3 have, 1 and 4 theirs, ...
//   host B: ranks 3 4 5     so each byte enters a host once, and all ranks' links are in use
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "shardcomm/communicator.h"

namespace shardcomm {

// Collectives among the ranks with one index, one on each host; their numbers here are those of
// the hosts. Each call returns when this rank's part is complete, and throws any exception if it
// cannot be. There are two channels, 0 and 1, each with an order of its own: a call of each may run
// at once, from two threads, which need not be the same ones each time. The communicator's
// destructor waits until all calls have returned.
class Across {
 public:
  virtual ~Across() = default;
  // recv[h * bytes ...] = send of host h.
  virtual void all_gather(int channel, const void* send, void* recv, std::size_t bytes) = 0;
  // recv[h * bytes ...] = send[own * bytes ...] of host h.
  virtual void all_to_all(int channel, const void* send, void* recv, std::size_t bytes) = 0;
  virtual void broadcast(int channel, void* buffer, std::size_t bytes, int root) = 0;
  // This rank leaves, after a failure or in peace. From now on the other hosts' present and later
  // calls with it throw, if that can be done. Any thread may call it, more than once.
  virtual void leave() noexcept = 0;
};

// Carries bytes through connected stream sockets. sockets[channel * hosts + h] leads to the rank
// with this one's index on host h; entries of this host are not looked at. It closes the sockets
// when it is destroyed. Throws std::invalid_argument, and closes none, if they are not such
// sockets.
std::unique_ptr<Across> make_sockets(std::vector<int> sockets, int host, int hosts);

// Makes a communicator of `hosts` times `on_host->size()` ranks, in which this rank's number is
// host * on_host->size() + on_host->rank(). `on_host` is a communicator of shm, or of local on a
// CPU, and is used by nobody else from now on. Collective among all ranks, which compare their
// numbers.
//
// It has all_gather, reduce_scatter, also coded, all_reduce, broadcast, barrier and allocate. If a
// rank dies, is late or calls something else, all ranks of its host throw CommError, and each of
// them makes the ranks with its own index on the other hosts throw it, too.
std::shared_ptr<Communicator> make_hosts(std::shared_ptr<Communicator> on_host,
                                         std::unique_ptr<Across> across, int host, int hosts);

}  // namespace shardcomm
