// The portable path: plain C++, one element at a time, for processors without AVX2.
#include <cmath>

#include "update.h"

namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_half(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000u, magnitude = bits_of(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // subnormal in half precision: adding 0.5 leaves multiples of 2^-24, rounded by the hardware
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

struct Portable {
  using Float = float;
  using Int = uint32_t;
  static constexpr int width = 1;
  static constexpr int unroll = 4;

  struct All {};
  static All all_lanes() { return {}; }
  static All first_lanes(int) { return {}; }  // never needed: a vector is one element

  static Float zero() { return 0.0f; }
  static Float set1(float x) { return x; }
  static Float mul(Float a, Float b) { return a * b; }
  // Two roundings: std::fma is a slow call where there is no FMA instruction.
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static Float fnma(Float a, Float b, Float c) { return c - a * b; }

  static Int set1(uint32_t x) { return x; }
  static Int add(Int a, Int b) { return a + b; }
  static Int mul(Int a, Int b) { return a * b; }
  static Int bit_and(Int a, Int b) { return a & b; }
  static Int bit_xor(Int a, Int b) { return a ^ b; }
  template <int n> static Int shift_right(Int a) { return a >> n; }
  static Int counting_from(uint32_t first) { return first; }

  struct Quotient {
    const float root_scale, eps;

    Quotient(float root_scale, float eps) : root_scale(root_scale), eps(eps) {}

    Float operator()(Float m, Float v) const { return m / (__builtin_sqrtf(v) * root_scale + eps); }
  };

  static Float load(const float* p, All) { return *p; }
  static Float load(const BF16* p, All) { return float_of(static_cast<uint32_t>(p->bits) << 16); }
  static Float load(const F16* p, All) { return half_to_float(p->bits); }

  static void store(float* p, Float x, All) { *p = x; }
  static void store(BF16* p, Float x, All lanes) { store_stochastic(p, x, 0x7fffu + ((bits_of(x) >> 16) & 1u), lanes); }
  static void store(F16* p, Float x, All) { p->bits = float_to_half(x); }
  static void store_stochastic(BF16* p, Float x, Int low, All) {
    p->bits = x != x ? 0x7fc0u : static_cast<uint16_t>((bits_of(x) + low) >> 16);
  }
};

}  // namespace

namespace stallfree {
const Table portable_table = STALLFREE_TABLE(Portable);
}
