// What the wire carries at best: rows of random routings, pushed to where they belong with nothing else to do.
//
// No counts, no order, no metadata, no signals: each warp loads rows by bulk copies and stores each to the ranks that
// its routing names. Prints one line per SM count and row size: `push SMs row-bytes µs GB/s`, bytes of all received
// rows, the local ones included, and the mean over GPUs of the time per launch in a row of launches.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "device/row_ring.cuh"

namespace {

constexpr int kMaxGpus = 16, kTokens = 4096, kExperts = 256, kTopk = 8, kStages = 14, kLaunches = 20;

struct PushParams {
  const uint8_t* rows;
  const int* places;  // [tokens, GPUs] row at each GPU, or −1
  uint8_t* target[kMaxGpus];
  int num_gpus, row_bytes;
};

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

__global__ void __launch_bounds__(32, 1) push(const __grid_constant__ PushParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t barriers[kStages];
  const int lane = threadIdx.x, first = blockIdx.x, stride = gridDim.x;
  const int count = (kTokens - first + stride - 1) / stride;
  hybrid_ep::RowRing<hybrid_ep::kDispatchStoresInFlight> ring(stages, barriers, kStages, params.row_bytes, lane);
  const auto row_of = [&](int i) { return params.rows + static_cast<int64_t>(first + i * stride) * params.row_bytes; };
  const auto load_place = [&](int i) {
    return i < count && lane < params.num_gpus ? params.places[(first + i * stride) * params.num_gpus + lane] : -1;
  };
  for (int i = 0; i < min(count, ring.num_ahead()); ++i) ring.fetch(row_of(i));
  int next = load_place(0);
  for (int i = 0; i < count; ++i) {
    const int place = next;
    next = load_place(i + 1);
    const uint8_t* stage = ring.wait();
    if (place >= 0) {
      hybrid_ep::ptx::bulk_store(params.target[lane] + static_cast<int64_t>(place) * params.row_bytes, stage,
                                 params.row_bytes);
    }
    ring.release();
    if (i + ring.num_ahead() < count) ring.fetch(row_of(i + ring.num_ahead()));
  }
  hybrid_ep::ptx::bulk_wait_written<0>();
}

}  // namespace

int main(int argc, char** argv) {
  int num_gpus = argc > 1 ? std::atoi(argv[1]) : 0, num_visible = 0;
  check(cudaGetDeviceCount(&num_visible));
  if (num_gpus < 2 || num_gpus > std::min(num_visible, kMaxGpus) || kExperts % num_gpus) {
    std::fprintf(stderr, "usage: wire_limit GPUS, a divisor of %d from 2 to %d\n", kExperts, num_visible);
    return 2;
  }
  std::vector<PushParams> params(num_gpus);
  std::vector<int> filled(num_gpus, 0);
  std::vector<std::vector<int>> places(num_gpus, std::vector<int>(kTokens * num_gpus, -1));
  int64_t num_rows = 0;
  for (int g = 0; g < num_gpus; ++g) {
    std::mt19937 random(g);
    std::vector<int> experts(kExperts);
    for (int e = 0; e < kExperts; ++e) experts[e] = e;
    for (int t = 0; t < kTokens; ++t) {
      for (int k = 0; k < kTopk; ++k) {
        std::swap(experts[k], experts[k + random() % (kExperts - k)]);
        const int r = experts[k] / (kExperts / num_gpus);
        int& place = places[g][t * num_gpus + r];
        if (place >= 0) continue;
        place = filled[r]++;
        ++num_rows;
      }
    }
  }
  constexpr int kMaxRowBytes = 14336;
  for (int g = 0; g < num_gpus; ++g) {
    check(cudaSetDevice(g));
    for (int j = 0; j < num_gpus; ++j) {
      if (j != g) check(cudaDeviceEnablePeerAccess(j, 0));
    }
    void *rows, *target, *routing;
    check(cudaMalloc(&rows, static_cast<size_t>(kTokens) * kMaxRowBytes));
    check(cudaMalloc(&target, static_cast<size_t>(kTokens) * num_gpus * kMaxRowBytes));
    check(cudaMalloc(&routing, places[g].size() * sizeof(int)));
    check(cudaMemset(rows, g + 1, static_cast<size_t>(kTokens) * kMaxRowBytes));
    check(cudaMemcpy(routing, places[g].data(), places[g].size() * sizeof(int), cudaMemcpyHostToDevice));
    params[g].rows = static_cast<uint8_t*>(rows);
    params[g].places = static_cast<int*>(routing);
    params[g].num_gpus = num_gpus;
    for (auto& other : params) other.target[g] = static_cast<uint8_t*>(target);
    check(cudaFuncSetAttribute(push, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kMaxRowBytes));
  }
  for (const int row_bytes : {14336, 7168}) {
    for (const int num_sms : {4, 8, 12, 16, 24, 32}) {
      std::vector<cudaEvent_t> begin(num_gpus), end(num_gpus);
      const auto launch = [&](int g) {
        params[g].row_bytes = row_bytes;
        push<<<num_sms, 32, kStages * row_bytes>>>(params[g]);
        check(cudaGetLastError());
      };
      for (int g = 0; g < num_gpus; ++g) {
        check(cudaSetDevice(g));
        check(cudaEventCreate(&begin[g]));
        check(cudaEventCreate(&end[g]));
        launch(g);
      }
      for (int g = 0; g < num_gpus; ++g) {
        check(cudaSetDevice(g));
        check(cudaDeviceSynchronize());
      }
      for (int g = 0; g < num_gpus; ++g) {
        check(cudaSetDevice(g));
        check(cudaEventRecord(begin[g]));
      }
      for (int i = 0; i < kLaunches; ++i) {
        for (int g = 0; g < num_gpus; ++g) {
          check(cudaSetDevice(g));
          launch(g);
        }
      }
      double mean_us = 0;
      for (int g = 0; g < num_gpus; ++g) {
        check(cudaSetDevice(g));
        check(cudaEventRecord(end[g]));
      }
      for (int g = 0; g < num_gpus; ++g) {
        check(cudaSetDevice(g));
        check(cudaDeviceSynchronize());
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin[g], end[g]));
        mean_us += 1e3 * ms / kLaunches / num_gpus;
      }
      std::printf("push %2d %5d %7.1f %6.1f\n", num_sms, row_bytes, mean_us,
                  static_cast<double>(num_rows) / num_gpus * row_bytes / mean_us / 1e3);
    }
  }
  return 0;
}
