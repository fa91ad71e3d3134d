// Groups of several hosts from C. The hosts' ranks are threads here, and what goes between hosts
// are groups of threads, too.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"

enum { kHosts = 2, kRanks = 2, kAll = kHosts * kRanks };

// Group number `number` of those ranks of `all` that give it; `size` of them, this rank's is
// `rank`.
static shc_comm* part_of(shc_comm* all, int number, int rank, int size) {
  struct named {
    int number;
    shc_unique_id id;
  } own, every[kAll];
  memset(&own, 0, sizeof(own));
  own.number = rank == 0 ? number : -1;
  if (rank == 0) ok(shc_get_unique_id(SHC_LOCAL, size, &own.id));
  ok(shc_all_gather(all, &own, SHC_U8, every, SHC_U8, sizeof(own), NULL, NULL));
  shc_comm_options options = SHC_COMM_OPTIONS_INIT;
  options.deadline_s = 60;
  shc_comm* comm = NULL;
  for (int r = 0; r < kAll; ++r) {
    if (every[r].number == number) {
      ok(shc_comm_init_rank(&comm, size, &every[r].id, rank, &options));
    }
  }
  require(comm != NULL, "there is a group");
  return comm;
}

struct links {
  shc_comm* channels[2];
  int fails;
  int destroyed;
  double deadline_s;  // of the latest call
};

static int status_of(shc_status status, char* error) {
  if (status == SHC_OK) return 0;
  strncpy(error, shc_last_error_text(), 255);
  return 1;
}

static int gather_hosts(void* context, int channel, const void* send, void* recv, size_t bytes,
                        char* error) {
  struct links* links = context;
  ok(shc_get_deadline(&links->deadline_s));
  if (links->fails) {
    strcpy(error, "the link is cut");
    return 7;
  }
  return status_of(shc_all_gather(links->channels[channel], send, SHC_U8, recv, SHC_U8,
                                  (int64_t)bytes, NULL, NULL),
                   error);
}

static int exchange_hosts(void* context, int channel, const void* send, void* recv, size_t bytes,
                          char* error) {
  struct links* links = context;
  const int64_t counts[kHosts] = {(int64_t)bytes, (int64_t)bytes};
  return status_of(
      shc_all_to_all(links->channels[channel], send, counts, recv, counts, SHC_U8, 0, NULL), error);
}

static int broadcast_hosts(void* context, int channel, void* buffer, size_t bytes, int root,
                           char* error) {
  struct links* links = context;
  return status_of(
      shc_broadcast(links->channels[channel], buffer, SHC_U8, (int64_t)bytes, root, NULL), error);
}

static void cut(void* context) {
  struct links* links = context;
  for (int channel = 0; channel < 2; ++channel) shc_comm_close(links->channels[channel]);
}

static void count_end(void* context) { ++((struct links*)context)->destroyed; }

static void every_collective(shc_comm* comm, int rank) {
  const int64_t counts[] = {1, 1000, 300000};
  for (int c = 0; c < 3; ++c) {
    const int64_t count = counts[c];
    const size_t bytes = (size_t)count * sizeof(float);
    shc_memory* memory = NULL;
    void* data = NULL;
    ok(shc_allocate(comm, kAll * bytes, SHC_GATHER, &memory, &data));
    float* full = data;
    float* own = malloc(bytes);
    float* all = malloc(kAll * bytes);
    for (int64_t i = 0; i < count; ++i) own[i] = value_of(rank, i);
    ok(shc_all_gather(comm, own, SHC_F32, full, SHC_F32, count, NULL, NULL));
    for (int64_t i = 0; i < kAll * count; ++i) {
      require(full[i] == value_of((int)(i / count), i % count), "gathered");
      all[i] = value_of(rank, i);
    }
    ok(shc_reduce_scatter(comm, all, SHC_F32, own, SHC_F32, count, SHC_SUM, NULL, NULL));
    ok(shc_all_reduce(comm, all, SHC_F32, kAll * count, SHC_SUM, 0, NULL));
    for (int64_t i = 0; i < kAll * count; ++i) {
      float total = 0;
      for (int r = 0; r < kAll; ++r) total += value_of(r, i);
      require(all[i] == total, "summed");
      if (i / count == rank) require(own[i % count] == total, "this rank's sum");
    }
    const int root = c + 1;
    if (rank == root) own[0] = 100 + (float)c;
    ok(shc_broadcast(comm, own, SHC_F32, count, root, NULL));
    require(own[0] == 100 + (float)c, "the root's");
    ok(shc_barrier(comm, 0, NULL));
    free(own);
    free(all);
    shc_memory_destroy(memory);
  }
}

// Partial sums of 1 + 2^-9, which both formats round to 1.
static void coded_sums(shc_comm* comm) {
  enum { kCount = 100 };
  float all[kAll * kCount];
  float own[kCount];
  const float sum_of_host = 1.001953125f;
  for (int i = 0; i < kAll * kCount; ++i) all[i] = sum_of_host / kRanks;
  const shc_block_format blocks = {SHC_MXINT8, 32, SHC_NEAREST};
  const shc_block_format* formats[] = {NULL, &blocks};
  const float bounds[] = {sum_of_host / 256, 1.0f / 128};
  for (int f = 0; f < 2; ++f) {
    shc_block_stats stats = {0, 0, 0};
    const shc_coding coding = {formats[f], &stats};
    shc_reduce_options options = SHC_REDUCE_OPTIONS_INIT;
    options.coding = &coding;
    ok(shc_reduce_scatter(comm, all, SHC_F32, own, SHC_F32, kCount, SHC_SUM, &options, NULL));
    for (int i = 0; i < kCount; ++i) require(own[i] == kHosts, "the sum of what was sent");
    require(stats.seen == sum_of_host - 1 && stats.bound == bounds[f] && stats.flagged == 0,
            "what coding has cost");
    shc_collective* bound = NULL;
    ok(shc_bind_reduce_scatter(comm, all, SHC_F32, own, SHC_F32, kCount, SHC_SUM, &options,
                               &bound));
    own[0] = 0;
    ok(shc_start(bound, NULL));
    require(own[0] == kHosts, "the same, bound");
    shc_collective_destroy(bound);
  }
  const shc_block_format odd = {SHC_MXINT8, 31, SHC_NEAREST};
  const shc_coding coding = {&odd, NULL};
  shc_reduce_options options = SHC_REDUCE_OPTIONS_INIT;
  options.coding = &coding;
  refused(shc_reduce_scatter(comm, all, SHC_F32, own, SHC_F32, kCount, SHC_SUM, &options, NULL),
          SHC_INVALID_ARGUMENT, "block is 31; accepted: 32, 64 and 128");
}

static void join_and_run(shc_comm* all) {
  const int rank = rank_of(all);
  const int host = rank / kRanks;
  const int index = rank % kRanks;
  struct links links = {{NULL, NULL}, 0, 0, -1};
  shc_comm* on_host = part_of(all, 10 + host, index, kRanks);
  for (int channel = 0; channel < 2; ++channel) {
    links.channels[channel] = part_of(all, 20 + 2 * index + channel, host, kHosts);
  }
  shc_across across = SHC_ACROSS_INIT;
  shc_comm* comm = NULL;
  refused(shc_comm_init_hosts(&comm, on_host, NULL, host, kHosts), SHC_INVALID_ARGUMENT,
          "across is NULL");
  refused(shc_comm_init_hosts(&comm, on_host, &across, host, kHosts), SHC_INVALID_ARGUMENT,
          "across->all_gather is NULL");
  across.context = &links;
  across.all_gather = gather_hosts;
  across.all_to_all = exchange_hosts;
  across.broadcast = broadcast_hosts;
  across.leave = cut;
  across.destroy = count_end;
  refused(shc_comm_init_hosts(&comm, on_host, &across, kHosts, kHosts), SHC_INVALID_ARGUMENT,
          "shc_comm_init_hosts: host is 2 of 2");
  refused(shc_comm_init_hosts(NULL, on_host, &across, host, kHosts), SHC_INVALID_ARGUMENT,
          "comm is NULL");
  require(links.destroyed == 2, "what a failed call was given is destroyed");

  ok(shc_comm_init_hosts(&comm, on_host, &across, host, kHosts));
  shc_comm_destroy(on_host);
  require(rank_of(comm) == rank && size_of(comm) == kAll, "numbers of all hosts");
  every_collective(comm, rank);
  coded_sums(comm);
  require(links.deadline_s == 0, "the group's");
  ok(shc_set_deadline(50));
  ok(shc_barrier(comm, 0, NULL));
  ok(shc_set_deadline(0));
  require(links.deadline_s == 50, "what carries is told of the call's");
  ok(shc_barrier(all, 0, NULL));
  links.fails = rank == 3;
  const shc_status status = shc_barrier(comm, 0, NULL);
  if (rank == 3) {
    refused(status, SHC_COMM_ERROR, "across->all_gather returned 7: the link is cut");
  } else {
    require(status == SHC_COMM_ERROR, "the others hear of it");
  }
  shc_comm_destroy(comm);
  require(links.destroyed == 3, "destroyed once");
  ok(shc_barrier(all, 0, NULL));
  for (int channel = 0; channel < 2; ++channel) shc_comm_destroy(links.channels[channel]);
}

static int pairs[kRanks][2][2];  // of each index, for each channel

static void make_pairs(void) {
  for (int index = 0; index < kRanks; ++index) {
    for (int channel = 0; channel < 2; ++channel) {
      require(socketpair(AF_UNIX, SOCK_STREAM, 0, pairs[index][channel]) == 0, "a pair");
    }
  }
}

static void join_by_sockets(shc_comm* all) {
  const int rank = rank_of(all);
  const int host = rank / kRanks;
  const int index = rank % kRanks;
  shc_comm* on_host = part_of(all, 10 + host, index, kRanks);
  int sockets[2 * kHosts] = {-1, -1, -1, -1};
  for (int channel = 0; channel < 2; ++channel) {
    sockets[channel * kHosts + 1 - host] = pairs[index][channel][host];
  }
  shc_comm* comm = NULL;
  refused(shc_comm_init_hosts_over_sockets(&comm, on_host, NULL, host, kHosts),
          SHC_INVALID_ARGUMENT, "sockets is NULL");
  refused(shc_comm_init_hosts_over_sockets(&comm, on_host, sockets, 1 - host, kHosts),
          SHC_INVALID_ARGUMENT, "] is -1, which is no connected stream socket");
  refused(shc_comm_init_hosts_over_sockets(&comm, on_host, sockets, host, -1), SHC_INVALID_ARGUMENT,
          "of -1; there must be at least 2");
  ok(shc_comm_init_hosts_over_sockets(&comm, on_host, sockets, host, kHosts));
  shc_comm_destroy(on_host);
  require(rank_of(comm) == rank && size_of(comm) == kAll, "numbers of all hosts");
  every_collective(comm, rank);
  coded_sums(comm);
  ok(shc_barrier(all, 0, NULL));
  if (rank == 1) shc_comm_close(comm);
  require(rank == 1 || shc_barrier(comm, 0, NULL) == SHC_COMM_ERROR, "the others hear of it");
  shc_comm_destroy(comm);
  ok(shc_barrier(all, 0, NULL));
  for (int channel = 0; channel < 2; ++channel) {
    require(fcntl(pairs[index][channel][host], F_GETFD) == -1, "the group has closed it");
  }
}

int main(void) {
  on_threads(kAll, join_and_run);
  make_pairs();
  on_threads(kAll, join_by_sockets);
  return 0;
}
