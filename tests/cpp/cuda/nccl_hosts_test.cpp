// The NCCL transport's sums of 16-bit floats over several hosts: right values, and how many bytes
// leave a host, beside what a ring and an exchange of all with all take.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "comm/buffer.h"
#include "nccl_ranks.h"

namespace {

using namespace shardcomm;
using namespace shardcomm::test;

// What leaves a host in one reduce-scatter of bf16, per rank and slice.
double slices_between_hosts(int hosts, int per_host, bool told, bool by_ring) {
  constexpr int kPart = 4096;  // the bytes of connecting are few beside it
  const int ranks = hosts * per_host;
  Setting setting;
  setting.ranks = ranks;
  setting.deadline_s = 120;
  setting.fake.ranks_per_node = setting.connected.ranks_per_node = per_host;
  if (told) setting.host = [per_host](int rank) { return std::to_string(rank / per_host); };
  double between = 0;
  on_ranks((std::to_string(hosts) + "x" + std::to_string(per_host) +
            (by_ring ? " by a ring"
             : told  ? " by hosts"
                     : " exchanged"))
               .c_str(),
           setting, [&](const Comm& comm) {
             const Queue queue(comm);
             comm->barrier(0, queue.get());
             queue.finish();
             std::vector<std::uint16_t> send(static_cast<std::size_t>(ranks * kPart));
             for (std::size_t i = 0; i < send.size(); ++i) {
               send[i] = bf16_of(static_cast<float>((i + comm->rank()) % 8) / 8);
             }
             std::vector<float> result(kPart);
             if (by_ring) {
               comm->reduce_scatter(send.data(), DType::i32, result.data(), {DType::i32}, kPart / 2,
                                    RedOp::sum, 0, queue.get());
             } else {
               comm->reduce_scatter(send.data(), DType::bf16, result.data(), {}, kPart, RedOp::sum,
                                    0, queue.get());
               require(
                   receipt(comm, "reduce_scatter").taken == (told ? "hierarchical" : "exchange"),
                   "its path");
             }
             queue.finish();
             for (int i = 0; !by_ring && i < kPart; ++i) {
               float sum = 0;  // exact: multiples of 1/8
               for (int r = 0; r < ranks; ++r) {
                 sum += static_cast<float>((comm->rank() * kPart + i + r) % 8) / 8;
               }
               require(result[static_cast<std::size_t>(i)] == sum, "the sum is right");
             }
           });
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (from / per_host != to / per_host) between += static_cast<double>(bytes_sent(from, to));
    }
  }
  return between / hosts / (kPart * sizeof(std::uint16_t));
}

void bytes_between_hosts() {
  for (const int hosts : {2, 4}) {
    const double ring = slices_between_hosts(hosts, 8, true, true);
    const double exchanged = slices_between_hosts(hosts, 8, false, false);
    const double hierarchical = slices_between_hosts(hosts, 8, true, false);
    std::printf("  slices out of a host: ring %.2f, exchange %.2f, hierarchical %.2f\n", ring,
                exchanged, hierarchical);
    require(hierarchical <= 1.1 * ring, "no more leaves a host than 1.1 of a ring's");
  }
}

void uneven_hosts_exchange() {
  Setting setting;
  setting.host = [](int rank) { return rank < 2 ? "A" : "B"; };
  on_ranks("uneven hosts", setting, [](const Comm& comm) {
    const Queue queue(comm);
    std::vector<std::uint16_t> send(3, bf16_of(1));
    float result = 0;
    comm->reduce_scatter(send.data(), DType::bf16, &result, {}, 1, RedOp::avg, 0, queue.get());
    queue.finish();
    require(result == 1 && receipt(comm, "reduce_scatter").taken == "exchange", "exchanged");
  });
}

// Hosts need not have neighbouring ranks; a scale, an average and what was there are applied once.
void interleaved_hosts() {
  Setting setting;
  setting.ranks = 6;
  setting.host = [](int rank) { return rank % 2 == 0 ? "A" : "B"; };
  on_ranks("interleaved hosts", setting, [](const Comm& comm) {
    const Queue queue(comm);
    constexpr int kPart = 50;
    std::vector<std::uint16_t> send(6 * kPart);
    for (int i = 0; i < 6 * kPart; ++i) {
      send[static_cast<std::size_t>(i)] = bf16_of(static_cast<float>(i % 5 * (comm->rank() + 1)));
    }
    std::vector<float> result(kPart, 100);
    comm->reduce_scatter(send.data(), DType::bf16, result.data(), {DType::f32, 2.0f, true}, kPart,
                         RedOp::avg, 0, queue.get());
    queue.finish();
    require(receipt(comm, "reduce_scatter").taken == "hierarchical", "by hosts");
    for (int i = 0; i < kPart; ++i) {
      const auto value = static_cast<float>((comm->rank() * kPart + i) % 5);
      const float expected = 100 + 2 * (21 * value * (1.0f / 6));
      require(std::abs(result[static_cast<std::size_t>(i)] - expected) < 1e-4f, "averaged");
    }
  });
}

// The ranks of a host hold parts of any lengths, or none. Of large messages, both sides lie in
// registered memory, or neither.
void parts_of_any_length() {
  Setting setting;
  setting.ranks = 4;
  setting.host = [](int rank) { return rank % 2 == 0 ? "A" : "B"; };
  on_ranks("parts of any length", setting, [](const Comm& comm) {
    const Queue queue(comm);
    for (const std::vector<std::int64_t>& counts :
         {std::vector<std::int64_t>{5, 0, 1, 30}, {9000, 9000, 9000, 9000}, {9000, 0, 1, 30000}}) {
      const Parts parts(counts);
      const auto memory = comm->allocate(bytes_of(parts.total(4), DType::bf16), Use::reduce);
      std::vector<std::uint16_t> plain(static_cast<std::size_t>(parts.total(4)));
      for (std::size_t i = 0; i < plain.size(); ++i) {
        plain[i] = bf16_of(static_cast<float>(static_cast<int>(i % 5) * (comm->rank() + 1)));
      }
      std::memcpy(memory->data(), plain.data(), plain.size() * sizeof(plain[0]));
      for (const void* send :
           {static_cast<const void*>(plain.data()), static_cast<const void*>(memory->data())}) {
        std::vector<float> result(static_cast<std::size_t>(parts.count(comm->rank())));
        comm->reduce_scatter(send, DType::bf16, result.data(), {}, parts, RedOp::sum, 0,
                             queue.get());
        queue.finish();
        require(receipt(comm, "reduce_scatter").taken == "hierarchical", "by hosts");
        for (std::size_t i = 0; i < result.size(); ++i) {
          const auto place = static_cast<std::size_t>(parts.begin(comm->rank())) + i;
          require(result[i] == static_cast<float>(place % 5 * 10), "summed");
        }
      }
    }
  });
}

std::uint16_t f16_of_40000() { return 0x78e2; }

// The sum would overflow, and the average does not.
void averages_of_fp16() {
  for (const bool several : {false, true}) {
    Setting setting;
    setting.ranks = 4;
    if (several) setting.host = [](int rank) { return std::to_string(rank / 2); };
    on_ranks("averages of fp16", setting, [](const Comm& comm) {
      const Queue queue(comm);
      std::vector<std::uint16_t> send(8, f16_of_40000());
      std::vector<float> result(2);
      comm->reduce_scatter(send.data(), DType::f16, result.data(), {}, 2, RedOp::avg, 0,
                           queue.get());
      comm->all_reduce(send.data(), DType::f16, 8, RedOp::avg, 0, queue.get());
      queue.finish();
      require(result[1] == 40000, "reduce_scatter");
      require(send[7] == f16_of_40000(), "all_reduce");
    });
  }
}

}  // namespace

int main(int, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  load(arguments[1]);
  std::printf("NCCL %d\n", version());
  bytes_between_hosts();
  uneven_hosts_exchange();
  interleaved_hosts();
  parts_of_any_length();
  averages_of_fp16();
  std::puts("good");
  return 0;
}
