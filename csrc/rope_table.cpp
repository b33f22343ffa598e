#include "rope_table.h"

namespace forerun {

void sin_cos(double angle, double* sin, double* cos) {
  // Cody-Waite: angle = k * pi/2 + r, pi/2 in three parts of 33 bits, so that k * part is exact for k < 2^20.
  const double part1 = 1.57079632673412561417e+00;
  const double part2 = 6.07710050630396597660e-11;
  const double part3 = 2.02226624871116645580e-21;
  const double k = static_cast<double>(static_cast<long long>(angle * 6.36619772367581382433e-01 + 0.5));
  const double r = ((angle - k * part1) - k * part2) - k * part3;
  const double z = r * r;
  // Taylor coefficients; |r| <= pi/4, so the first term left out is below 1e-17.
  double s = -1.0 / 1307674368000.0;
  s = s * z + 1.0 / 6227020800.0;
  s = s * z - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  s = r + r * z * s;
  double c = 1.0 / 20922789888000.0;
  c = c * z - 1.0 / 87178291200.0;
  c = c * z + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * z - 0.5;
  c = 1.0 + z * c;
  switch (static_cast<long long>(k) & 3) {
    case 0: *sin = s; *cos = c; break;
    case 1: *sin = c; *cos = -s; break;
    case 2: *sin = -s; *cos = -c; break;
    default: *sin = -c; *cos = s; break;
  }
}

}  // namespace forerun
