// The keyed noise of token selection and the exponential of its filters, for host and device. Every operation is one
// IEEE multiply, add or division in a fixed order, so that CPU, CUDA and the plain-torch twin give the same bits: on
// the host compile with -ffp-contract=off and never -ffast-math; on the device the wrappers below keep products
// unfused.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define DFLASH_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define DFLASH_HOST_DEVICE static inline
#endif

#ifdef __CUDA_ARCH__
#define DFLASH_MUL32(a, b) __fmul_rn(a, b)
#define DFLASH_ADD32(a, b) __fadd_rn(a, b)
#define DFLASH_MUL64(a, b) __dmul_rn(a, b)
#define DFLASH_ADD64(a, b) __dadd_rn(a, b)
#define DFLASH_DIV64(a, b) __ddiv_rn(a, b)
#else
#define DFLASH_MUL32(a, b) ((a) * (b))
#define DFLASH_ADD32(a, b) ((a) + (b))
#define DFLASH_MUL64(a, b) ((a) * (b))
#define DFLASH_ADD64(a, b) ((a) + (b))
#define DFLASH_DIV64(a, b) ((a) / (b))
#endif

namespace dflash {

template <typename To, typename From>
DFLASH_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

struct Words4 {
  uint32_t word[4];
};

// Philox 4x32-10 (Salmon et al. 2011): multipliers, then the increments of the key.
constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;

DFLASH_HOST_DEVICE Words4 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxM0) * c0, p1 = uint64_t(kPhiloxM1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// The four words of tokens 4 * group .. 4 * group + 3 at one position; stream 0 is the target's noise.
DFLASH_HOST_DEVICE Words4 noise_words(uint32_t group, uint64_t position, uint32_t stream, uint64_t seed) {
  return philox(group, uint32_t(position), uint32_t(position >> 32), stream, uint32_t(seed), uint32_t(seed >> 32));
}

// ((first x + next) x + next) ..., each product and sum rounded.
template <typename... Next>
DFLASH_HOST_DEVICE double horner(double x, double sum, Next... next) {
  ((sum = DFLASH_ADD64(DFLASH_MUL64(sum, x), next)), ...);
  return sum;
}
template <typename... Next>
DFLASH_HOST_DEVICE float horner(float x, float sum, Next... next) {
  ((sum = DFLASH_ADD32(DFLASH_MUL32(sum, x), next)), ...);
  return sum;
}

// ln(x) for positive normal x, relative error below 1e-15:
// k ln2 + 2 artanh(s), s = (m - 1) / (m + 1), x = 2^k m, m in [sqrt(1/2), sqrt(2)).
DFLASH_HOST_DEVICE double log64(double x) {
  const int64_t bits = bit_cast<int64_t>(x) + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD);
  const double k = double((bits >> 52) - 1023);
  const double m = bit_cast<double>((bits & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD);
  const double s = DFLASH_DIV64(DFLASH_ADD64(m, -1.0), DFLASH_ADD64(m, 1.0));
  const double square = DFLASH_MUL64(s, s);
  const double series = horner(square, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0,
                               1.0 / 5.0, 1.0 / 3.0, 1.0);
  return DFLASH_ADD64(DFLASH_MUL64(k, 0.6931471805599453), DFLASH_MUL64(DFLASH_ADD64(s, s), series));
}

// Standard Gumbel noise of a word: -ln(-ln(1 - w)), w = (word + 0.5) / 2^32 exact. At most -ln(w), since -ln(1 - w) >=
// w.
DFLASH_HOST_DEVICE float gumbel(uint32_t word) {
  const double w = DFLASH_MUL64(DFLASH_ADD64(double(word), 0.5), 2.3283064365386963e-10);
  return float(-log64(-log64(DFLASH_ADD64(1.0, -w))));
}

// exp(d) for d <= 0, relative error below 2e-7; 0 below -86. Branch-free, so that a loop over it vectorises.
DFLASH_HOST_DEVICE float shared_exp(float d) {
  const bool under = d < -86.0f;
  d = under ? 0.0f : d;
  const float n = DFLASH_ADD32(DFLASH_ADD32(DFLASH_MUL32(d, 1.4426950216293335f), 12582912.0f), -12582912.0f);
  const float r = DFLASH_ADD32(DFLASH_ADD32(d, -DFLASH_MUL32(n, 0.693359375f)), -DFLASH_MUL32(n, -2.12194442e-4f));
  const float p =
      horner(r, 1.9875691e-4f, 1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666666e-1f, 0.5f, 1.0f, 1.0f);
  const float e = DFLASH_MUL32(p, bit_cast<float>(uint32_t(int32_t(n) + 127) << 23));
  return under ? 0.0f : e;
}

// rint(e * 2^38) for 0 <= e <= 2: adding 1.5 * 2^52 leaves the integer in the low bits. Sums of these have no order.
DFLASH_HOST_DEVICE int64_t fixed_point(float e) {
  const double shifted = DFLASH_ADD64(DFLASH_MUL64(double(e), 274877906944.0), 6755399441055744.0);
  return bit_cast<int64_t>(shifted) - 0x4338000000000000;
}

// ---- how a row draws its token

// score = sharpness * z + noise with z = logit / temperature; greedy: score = logit.
struct Draw {
  float temperature, sharpness;
  bool greedy;
};

DFLASH_HOST_DEVICE Draw draw_of(float temperature, float sharpness) {
  constexpr float kLargest = 3.4028234663852886e38f;
  return {temperature > kLargest ? kLargest : temperature, sharpness >= 0.0f ? sharpness : 0.0f,
          !(temperature > 0.0f) || sharpness == __builtin_inff()};
}

// sharpness * z; infinite z stay, whatever the sharpness.
DFLASH_HOST_DEVICE float sharpened(const Draw& draw, float z) {
  return bit_cast<uint32_t>(z) << 1 == 0xff000000u ? z : DFLASH_MUL32(draw.sharpness, z);
}

// z - top; the largest logit gives 0 even if it is infinite.
DFLASH_HOST_DEVICE float below_top(float z, float top) { return z == top ? 0.0f : z - top; }

// Where the weight of a token goes while a threshold is looked for, by how far z is below the largest.
constexpr int kBuckets = 1024;  // of width 1/32

DFLASH_HOST_DEVICE int bucket_of(float below_top) {
  const float bucket = below_top * -32.0f;
  return int(bucket < float(kBuckets - 1) ? bucket : float(kBuckets - 1));
}

struct Filters {
  int64_t top_k;
  float top_p, min_p;
};

DFLASH_HOST_DEVICE bool any_filter(const Filters& f) { return f.top_k > 0 || f.top_p < 1.0f || f.min_p > 0.0f; }

// The fixed-point weight exp(z[i] - top) of a value that top-k keeps, -1 of another. Values of -inf are none.
DFLASH_HOST_DEVICE int64_t weight_in_top_k(const float* z, int count, int i, float top, const Filters& f) {
  int64_t greater = 0;
  if (f.top_k > 0)
    for (int j = 0; j < count; ++j) greater += z[j] > z[i];
  return f.top_k > 0 && greater >= f.top_k ? -1 : fixed_point(shared_exp(below_top(z[i], top)));
}

// Does a value stay? `weight` holds weight_in_top_k of all. The largest always does.
DFLASH_HOST_DEVICE bool is_kept(const float* z, const int64_t* weight, int count, int i, float top, const Filters& f) {
  if (z[i] == top) return true;
  if (weight[i] < 0 || (f.min_p > 0.0f && !(shared_exp(z[i] - top) >= f.min_p))) return false;
  if (!(f.top_p < 1.0f)) return true;
  int64_t above = 0, total = 0;
  for (int j = 0; j < count; ++j) {
    const int64_t own = weight[j] > 0 ? weight[j] : 0;
    total += own;
    above += z[j] > z[i] ? own : 0;
  }
  return double(above) < DFLASH_MUL64(double(f.top_p), double(total));
}

}  // namespace dflash
