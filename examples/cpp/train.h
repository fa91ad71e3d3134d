// Trains a network of two layers on plain arrays, fully sharded: every rank holds a part of the
// parameters, gathers all of them for a step, and gets the mean of its part of the gradients. The
// losses are the same on any number of ranks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "shardcomm.hpp"

constexpr int kInputs = 4, kHidden = 32, kBatch = 60, kSteps = 400;
constexpr float kRate = 0.1f;

// y = w2 . tanh(w1 x), to learn y = sin(2 * sum of x).
struct Network {
  const float* w1;  // kHidden x kInputs
  const float* w2;  // kHidden
};

// This rank's share of the examples of a step.
struct Batch {
  std::vector<float> x, y;
  int begin, end;

  Batch(unsigned step, int rank, int size)
      : x(kBatch * kInputs),
        y(kBatch),
        begin(kBatch * rank / size),
        end(kBatch * (rank + 1) / size) {
    std::mt19937 generator(step);
    std::uniform_real_distribution<float> number(-1, 1);
    for (int b = 0; b < kBatch; ++b) {
      float sum = 0;
      for (int i = 0; i < kInputs; ++i) sum += x[b * kInputs + i] = number(generator);
      y[b] = std::sin(2 * sum);
    }
  }
};

// The mean squared error; its gradients go to g1 and g2.
inline float loss_and_gradients(const Network& net, const Batch& batch, float* g1, float* g2) {
  std::fill_n(g1, kHidden * kInputs, 0.0f);
  std::fill_n(g2, kHidden, 0.0f);
  float loss = 0;
  for (int b = batch.begin; b < batch.end; ++b) {
    const float* x = &batch.x[b * kInputs];
    float hidden[kHidden], y = 0;
    for (int h = 0; h < kHidden; ++h) {
      float sum = 0;
      for (int i = 0; i < kInputs; ++i) sum += net.w1[h * kInputs + i] * x[i];
      hidden[h] = std::tanh(sum);
      y += net.w2[h] * hidden[h];
    }
    const float error = (y - batch.y[b]) / (batch.end - batch.begin);
    loss += error * (y - batch.y[b]);
    for (int h = 0; h < kHidden; ++h) {
      g2[h] += 2 * error * hidden[h];
      const float d = 2 * error * net.w2[h] * (1 - hidden[h] * hidden[h]);
      for (int i = 0; i < kInputs; ++i) g1[h * kInputs + i] += d * x[i];
    }
  }
  return loss;
}

inline void train(const shc::Comm& comm) {
  // Where every parameter lies: whole rows, on one rank or another.
  const std::vector<shc_param> params = {{kHidden, kInputs, 1}, {kHidden, 1, 1}};
  const shc::Layout layout(params, comm.size());
  const std::int64_t shard_elements = layout.shard_elements();
  const std::int64_t elements = comm.size() * shard_elements;

  // Memory in which ranks reach each other, and the two collectives of a step, bound to it once.
  const shc::Buffer<float> full(comm, elements, SHC_GATHER);
  const shc::Buffer<float> gradients(comm, elements, SHC_REDUCE);
  std::vector<float> shard(shard_elements), shard_gradient(shard_elements);
  const auto gather = comm.bind_all_gather(shard.data(), full.data(), shard_elements);
  const auto reduce =
      comm.bind_reduce_scatter(gradients.data(), shard_gradient.data(), shard_elements, SHC_AVG);

  // The same random start on every rank, of which each keeps its part.
  std::mt19937 generator(0);
  std::normal_distribution<float> number(0, 0.3f);
  std::vector<float> start(elements);
  for (float& value : start) value = number(generator);
  std::copy_n(&start[comm.rank() * shard_elements], shard_elements, shard.begin());

  const Network net{full.data() + layout.offset(0), full.data() + layout.offset(1)};
  for (int step = 0; step < kSteps; ++step) {
    gather();
    float loss = loss_and_gradients(net, Batch(step, comm.rank(), comm.size()),
                                    gradients.data() + layout.offset(0),
                                    gradients.data() + layout.offset(1));
    reduce();
    for (std::int64_t i = 0; i < shard_elements; ++i) shard[i] -= kRate * shard_gradient[i];

    if (step % 100 != 0 && step != kSteps - 1) continue;
    comm.all_reduce(&loss, 1, SHC_AVG);
    if (comm.rank() == 0) std::printf("step %3d  loss %.4f\n", step, loss);
  }
}
