// cos and sin of position * inv_freq in float64 from + - * alone, so that no math library decides a bit.
#pragma once

namespace forerun {

// angle >= 0 and below about 1e6.
void sin_cos(double angle, double* sin, double* cos);

}  // namespace forerun
