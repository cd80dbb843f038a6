//! Typed quantities. An amount of memory, a number of items and a position in a trace cannot be
//! mixed up.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An amount of memory in bytes.
///
/// Displays in binary units (KiB, MiB, GiB, TiB) with two decimals, and in plain bytes below one
/// KiB. Arithmetic saturates: an estimate never wraps around to a small number.
///
/// ```
/// use firebox_trace::Bytes;
/// assert_eq!(Bytes::mib(24).to_string(), "24.00 MiB");
/// assert_eq!("1.5 GiB".parse::<Bytes>()?, Bytes::mib(1536));
/// # Ok::<(), firebox_trace::ParseBytesError>(())
/// ```
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(u64);

impl Bytes {
    /// No memory at all.
    pub const ZERO: Self = Self(0);
    /// More memory than any machine has.
    pub const MAX: Self = Self(u64::MAX);

    /// `count` bytes.
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// `count` KiB (1,024 bytes).
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// `count` MiB (1,048,576 bytes).
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// `count` GiB (1,073,741,824 bytes).
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self - other`, or zero if `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// This amount times `factor`, rounded to the nearest byte. Zero for a negative or NaN factor.
    pub fn scale(self, factor: f64) -> Self {
        Self((self.0 as f64 * factor).round() as u64)
    }

    /// `self / other` as a ratio. Infinite if `other` is zero and `self` is not.
    pub fn ratio(self, other: Self) -> f64 {
        self.0 as f64 / other.0 as f64
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let text = match UNITS.iter().find(|(size, _)| self.0 >= *size) {
            Some((size, unit)) => format!("{:.2} {unit}", self.0 as f64 / *size as f64),
            None => format!("{} B", self.0),
        };
        f.pad(&text)
    }
}

/// A text that is not an amount of memory, or is one that no machine has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ParseBytesError {
    reason: Unparsable,
}

/// Why a text is no amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Unparsable {
    #[error(
        "`{0}` is not an amount of memory: write a number and a unit, as in `24MiB`, `1.5 GiB` or `800 MB`"
    )]
    NoAmount(String),
    #[error(
        "`{0}` is more memory than can be counted: write less than 16777216 TiB, as in `24MiB` or `1.5 GiB`"
    )]
    TooMuch(String),
}

impl From<Unparsable> for ParseBytesError {
    fn from(reason: Unparsable) -> Self {
        Self { reason }
    }
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    /// Reads `123`, `24MiB`, `24 MiB`, `1.5GiB`, `800 MB`: binary units (KiB, MiB, GiB, TiB),
    /// decimal units (KB, MB, GB, TB) and plain bytes (`B` or nothing), in any case. An amount that
    /// `u64` cannot hold is an error.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseBytesError::from(Unparsable::NoAmount(text.to_owned()));
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let number: f64 = number.parse().map_err(|_| error())?;
        let unit: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" | "k" => 1 << 10,
            "mib" | "m" => 1 << 20,
            "gib" | "g" => 1 << 30,
            "tib" | "t" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(error()),
        };
        let bytes = (number * unit as f64).round();
        // As a float, `u64::MAX` is 2^64: the first number that is too large.
        match bytes < u64::MAX as f64 {
            true => Ok(Self(bytes as u64)),
            false => Err(Unparsable::TooMuch(text.to_owned()).into()),
        }
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self.saturating_sub(other)
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, factor: u64) -> Self {
        Self(self.0.saturating_mul(factor))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

/// A number of items: images, sentences, rows. A batch is the items that one optimizer step sees.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Items(usize);

impl Items {
    /// `count` items.
    pub const fn new(count: usize) -> Self {
        Self(count)
    }

    /// The number of items.
    pub const fn get(self) -> usize {
        self.0
    }
}

impl fmt::Display for Items {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<usize> for Items {
    fn from(count: usize) -> Self {
        Self(count)
    }
}

/// The position of a step in a trace, from zero.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct OpIndex(pub u32);

impl fmt::Display for OpIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_what_they_display() {
        for bytes in [0, 1, 1023, 1024, 1 << 20, 24 << 20, 3 << 30] {
            let bytes = Bytes::new(bytes);
            assert_eq!(bytes.to_string().parse::<Bytes>(), Ok(bytes));
        }
    }

    #[test]
    fn bytes_refuse_nonsense() {
        for text in ["", "MiB", "-3MiB", "12 parsecs", "1.2.3"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn more_than_can_be_counted_is_refused() {
        let tib = (1_u64 << 24) - 1;
        assert_eq!(format!("{tib}TiB").parse::<Bytes>(), Ok(Bytes::gib(tib << 10)));
        for text in ["99999999999999999999GiB", "16777216TiB", "18446744073709551616"] {
            let error = text.parse::<Bytes>().expect_err("it is too much");
            assert!(error.to_string().contains("more memory than can be counted"), "{error}");
        }
    }

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Bytes::MAX + Bytes::new(1), Bytes::MAX);
        assert_eq!(Bytes::new(1) - Bytes::new(2), Bytes::ZERO);
    }
}
