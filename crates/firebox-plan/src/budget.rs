//! How much memory a plan may use: what the user wrote, and how many bytes that is on a given
//! memory.
//!
//! Nothing here queries a memory. `host_memory.rs` reads the host's; whoever knows a card reads the
//! card's.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use firebox_trace::Bytes;

/// The least [`Budget::free`] leaves unused by default.
const LEAST_MARGIN: Bytes = Bytes::mib(256);

/// The share of all memory [`Budget::free`] leaves unused by default.
const MARGIN_SHARE: f64 = 0.05;

/// A snapshot of a memory: its size and how much is free.
///
/// ```
/// use firebox_plan::MemoryInfo;
/// use firebox_trace::Bytes;
///
/// let card = MemoryInfo::new(Bytes::gib(24), Bytes::gib(20), "card 0");
/// assert_eq!(card.to_string(), "card 0: 20.00 GiB of 24.00 GiB free");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All bytes, used or not.
    pub total: Bytes,
    /// The bytes that can be allocated now.
    pub free: Bytes,
    /// Which memory this is, in words a person would use.
    pub source: Cow<'static, str>,
}

impl MemoryInfo {
    /// A memory of `total` bytes of which `free` can be allocated now.
    pub fn new(total: Bytes, free: Bytes, source: impl Into<Cow<'static, str>>) -> Self {
        Self { total, free, source: source.into() }
    }
}

impl fmt::Display for MemoryInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} of {} free", self.source, self.free, self.total)
    }
}

/// How much memory a plan may use. Default: [`Budget::free`].
///
/// Parses and displays as `24.00 MiB`, `80%` or `free`. The last two may carry a margin:
/// `free - 1.00 GiB`.
///
/// ```
/// use firebox_plan::{Budget, MemoryInfo};
/// use firebox_trace::Bytes;
///
/// let card = MemoryInfo::new(Bytes::gib(20), Bytes::gib(15), "a card");
/// assert_eq!(Budget::Bytes(Bytes::mib(24)).resolve(&card)?, Bytes::mib(24));
/// assert_eq!("80%".parse::<Budget>()?.resolve(&card)?, Bytes::gib(16));
/// assert_eq!(Budget::free().resolve(&card)?, Bytes::gib(14));
/// assert_eq!(Budget::free().margin(Bytes::gib(5)).resolve(&card)?, Bytes::gib(10));
/// # Ok::<(), firebox_plan::BudgetError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Budget {
    /// An amount in bytes. Not compared with the memory there is.
    Bytes(Bytes),
    /// A share of all memory, used or not.
    Fraction {
        /// The share, above 0 and at most 1.
        of_total: f64,
        /// Bytes of that share to leave unused.
        margin: Bytes,
    },
    /// The memory that is free now.
    Free {
        /// Bytes to leave unused. `None`: 5 % of all memory or 256 MiB, whichever is more.
        margin: Option<Bytes>,
    },
}

impl Budget {
    /// A share of all memory, used or not. Must be above 0 and at most 1; otherwise
    /// [`resolve`](Self::resolve) returns an error.
    pub const fn fraction(of_total: f64) -> Self {
        Self::Fraction { of_total, margin: Bytes::ZERO }
    }

    /// The memory that is free now, minus 5 % of all memory or 256 MiB, whichever is more.
    ///
    /// The margin absorbs small changes made by other programs and the driver.
    /// [`margin`](Self::margin) sets another amount.
    pub const fn free() -> Self {
        Self::Free { margin: None }
    }

    /// Leaves `margin` unused.
    ///
    /// Replaces the margin of a share or of the free memory. Subtracts it from an amount in bytes.
    pub fn margin(self, margin: Bytes) -> Self {
        match self {
            Self::Bytes(bytes) => Self::Bytes(bytes - margin),
            Self::Fraction { of_total, .. } => Self::Fraction { of_total, margin },
            Self::Free { .. } => Self::Free { margin: Some(margin) },
        }
    }

    /// The number of bytes this budget allows on `memory`, at least one.
    ///
    /// # Errors
    /// The share is not a number, not above 0, or above 1; or the budget comes to zero bytes.
    pub fn resolve(&self, memory: &MemoryInfo) -> Result<Bytes, BudgetError> {
        self.validate()?;
        let bytes = match *self {
            Self::Bytes(bytes) => bytes,
            Self::Fraction { of_total, margin } => memory.total.scale(of_total) - margin,
            Self::Free { margin } => {
                let default = || memory.total.scale(MARGIN_SHARE).max(LEAST_MARGIN);
                memory.free.min(memory.total) - margin.unwrap_or_else(default)
            }
        };
        if bytes == Bytes::ZERO {
            return Err(BudgetError::NothingLeft { budget: *self, memory: memory.clone() });
        }
        Ok(bytes)
    }

    /// Reports the errors that can be found without a memory.
    fn validate(&self) -> Result<(), BudgetError> {
        match *self {
            Self::Bytes(Bytes::ZERO) => Err(BudgetError::Zero),
            Self::Fraction { of_total, .. } if !(of_total > 0.0 && of_total <= 1.0) => {
                Err(BudgetError::FractionOutOfRange { of_total })
            }
            _ => Ok(()),
        }
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::free()
    }
}

impl From<Bytes> for Budget {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (amount, margin) = match *self {
            Self::Bytes(bytes) => (bytes.to_string(), Bytes::ZERO),
            Self::Fraction { of_total, margin } => (percent(of_total), margin),
            Self::Free { margin: None } => ("free".to_owned(), Bytes::ZERO),
            // A margin of zero is printed. Without it the text would mean the default margin.
            Self::Free { margin: Some(margin) } => return f.pad(&format!("free - {margin}")),
        };
        match margin {
            Bytes::ZERO => f.pad(&amount),
            margin => f.pad(&format!("{amount} - {margin}")),
        }
    }
}

impl FromStr for Budget {
    type Err = BudgetError;

    /// Parses an amount (`24MiB`, `1.5 GiB`), a share of all memory (`80%`) or `free`.
    ///
    /// A share or `free` may be followed by a margin (`free - 1GiB`). A number with a decimal point
    /// needs a unit: `0.8` is not an amount of bytes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unreadable = || BudgetError::Unreadable { text: text.to_owned() };
        let amount = |text: &str| {
            let lacks_unit = text.contains('.') && text.trim().parse::<f64>().is_ok();
            let bytes = if lacks_unit { None } else { text.parse::<Bytes>().ok() };
            bytes.ok_or_else(unreadable)
        };
        let (base, margin) = match text.split_once('-') {
            Some((base, margin)) => (base.trim(), Some(amount(margin)?)),
            None => (text.trim(), None),
        };
        let budget = if base.eq_ignore_ascii_case("free") {
            Self::Free { margin }
        } else if let Some(percent) = base.strip_suffix('%') {
            let percent: f64 = percent.trim().parse().map_err(|_| unreadable())?;
            Self::Fraction { of_total: percent / 100.0, margin: margin.unwrap_or(Bytes::ZERO) }
        } else if margin.is_none() {
            Self::Bytes(amount(base)?)
        } else {
            return Err(unreadable());
        };
        budget.validate()?;
        Ok(budget)
    }
}

/// A budget that cannot be parsed, is out of range, or comes to nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// The text is not a budget.
    #[error("`{text}` is not a budget: write an amount as `24MiB`, a share as `80%`, or `free`")]
    Unreadable {
        /// The text.
        text: String,
    },
    /// The budget is an amount of zero bytes.
    #[error(
        "the budget is zero bytes: give an amount such as `24MiB`, a share such as `80%`, or `free`"
    )]
    Zero,
    /// The share is not above 0 and at most 1.
    #[error(
        "a share of {of_total} of all memory cannot be had: give a number above 0 and at most 1, as 0.8 for 80%"
    )]
    FractionOutOfRange {
        /// The share, which may be NaN.
        of_total: f64,
    },
    /// The budget is valid but comes to zero bytes on this memory.
    #[error(
        "a budget of `{budget}` leaves nothing ({memory}): free some memory, set a smaller margin, or give an amount"
    )]
    NothingLeft {
        /// The budget.
        budget: Budget,
        /// The memory it was resolved on.
        memory: MemoryInfo,
    },
}

/// A share in percent, without the rounding noise that multiplying by 100 adds to the last digits.
fn percent(of_total: f64) -> String {
    let text = format!("{:.6}", of_total * 100.0);
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<Bytes, &str>) {
        let card = MemoryInfo::new(Bytes::gib(10), Bytes::gib(8), "card");
        let found = text.parse::<Budget>().and_then(|budget| {
            assert_eq!(budget.to_string().parse(), Ok(budget), "{budget} reads as what it is");
            budget.resolve(&card)
        });
        assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(Into::into));
    }

    #[test]
    fn amounts() {
        check("24MiB", Ok(Bytes::mib(24)));
        check(" 1.5 GiB ", Ok(Bytes::mib(1536)));
        check("1048576", Ok(Bytes::mib(1)));
        // An amount above the total memory is kept: the user asked for it.
        check("1TiB", Ok(Bytes::gib(1024)));
    }

    #[test]
    fn shares() {
        check("80%", Ok(Bytes::gib(8)));
        check("100 %", Ok(Bytes::gib(10)));
        check("12.5%", Ok(Bytes::mib(1280)));
        check("90% - 1GiB", Ok(Bytes::gib(8)));
        assert_eq!(Budget::fraction(0.07).to_string(), "7%");
        assert_eq!(Budget::fraction(1.0 / 3.0).to_string(), "33.333333%");
        assert_eq!(Budget::fraction(f64::NAN).to_string(), "NaN%");
    }

    #[test]
    fn free_memory() {
        check("free", Ok(Bytes::gib(8) - Bytes::mib(512)));
        check("Free - 3 GiB", Ok(Bytes::gib(5)));
        check("free-0B", Ok(Bytes::gib(8)));
        let small = MemoryInfo::new(Bytes::gib(1), Bytes::gib(1), "card");
        assert_eq!(Budget::free().resolve(&small), Ok(Bytes::mib(768)));
        let odd = MemoryInfo::new(Bytes::gib(1), Bytes::gib(9), "card");
        assert_eq!(Budget::free().resolve(&odd), Ok(Bytes::mib(768)));
    }

    #[test]
    fn margins() {
        assert_eq!(Budget::free().margin(Bytes::gib(1)).to_string(), "free - 1.00 GiB");
        assert_eq!(Budget::fraction(0.5).margin(Bytes::gib(1)).to_string(), "50% - 1.00 GiB");
        let lowered = Budget::Bytes(Bytes::gib(3)).margin(Bytes::gib(1));
        assert_eq!(lowered, Budget::Bytes(Bytes::gib(2)));
        let again = Budget::free().margin(Bytes::gib(1)).margin(Bytes::gib(2));
        assert_eq!(again, Budget::Free { margin: Some(Bytes::gib(2)) });
    }

    #[test]
    fn texts_that_are_no_budget() {
        for text in ["", "much", "0.8", "%", "a%", "free - ", "free + 1GiB", "2GiB - 1GiB", "-3MiB"]
        {
            let hint = "write an amount as `24MiB`, a share as `80%`, or `free`";
            check(text, Err(&format!("`{text}` is not a budget: {hint}")));
        }
        let zero = "the budget is zero bytes: give an amount such as `24MiB`, a share such as `80%`, or `free`";
        check("0MiB", Err(zero));
        check("0", Err(zero));
    }

    #[test]
    fn shares_that_cannot_be_had() {
        let wrong = |share: &str| {
            format!(
                "a share of {share} of all memory cannot be had: give a number above 0 and at most 1, as 0.8 for 80%"
            )
        };
        check("0%", Err(&wrong("0")));
        check("150%", Err(&wrong("1.5")));
        check("NaN%", Err(&wrong("NaN")));
        check("inf%", Err(&wrong("inf")));
        let card = MemoryInfo::new(Bytes::gib(10), Bytes::gib(8), "card");
        for share in [0.0, -0.5, 1.0001, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let error = Budget::fraction(share).resolve(&card).unwrap_err();
            assert_eq!(error.to_string(), wrong(&share.to_string()));
        }
    }

    #[test]
    fn budgets_that_leave_nothing() {
        check(
            "free - 8GiB",
            Err(
                "a budget of `free - 8.00 GiB` leaves nothing (card: 8.00 GiB of 10.00 GiB free): \
                 free some memory, set a smaller margin, or give an amount",
            ),
        );
        let full = MemoryInfo::new(Bytes::gib(10), Bytes::mib(100), "card");
        assert!(matches!(Budget::free().resolve(&full), Err(BudgetError::NothingLeft { .. })));
        let none = MemoryInfo::new(Bytes::ZERO, Bytes::ZERO, "nothing");
        assert!(matches!(
            Budget::fraction(1.0).resolve(&none),
            Err(BudgetError::NothingLeft { .. })
        ));
    }
}
