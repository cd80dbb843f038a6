//! Compares predictions with measurements, for one case and for all, and writes the line for
//! scripts.

use std::collections::BTreeSet;
use std::fmt;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use firebox::Bytes;
use serde_json::{Value, json};

use crate::cases::Case;
use crate::process::{self, Found};

/// Smaller differences count as exact. They come from buffers of zero bytes, which have pages of
/// their own.
const ROUNDING: Bytes = Bytes::kib(64);

/// Results of the processes of one case.
pub struct Compared {
    pub case: Case,
    /// The card, if the driver is blank.
    pub card: Option<String>,
    /// At least one.
    pub found: Vec<Found>,
}

impl Compared {
    fn counted(&self) -> impl Iterator<Item = process::Compared> {
        self.found.iter().map(|found| found.counted(self.card.is_some()))
    }

    /// The smallest prediction of any process. All processes should predict the same.
    fn predicted(&self) -> Bytes {
        self.counted().map(|counted| counted.predicted).min().unwrap_or_default()
    }

    /// The largest prediction made before kernels were tuned, if any had to be tuned.
    fn before_tuning(&self) -> Option<Bytes> {
        let tuned = self.found.iter().filter(|found| found.tuned.is_some());
        tuned.map(|found| found.predicted).max()
    }

    /// The most bytes that any process used.
    fn most(&self) -> Bytes {
        self.counted().map(|counted| counted.measured).max().unwrap_or_default()
    }

    fn least(&self) -> Bytes {
        self.counted().map(|counted| counted.measured).min().unwrap_or_default()
    }

    /// The smallest ratio of predicted to measured bytes.
    ///
    /// If all processes predict the same, this is the prediction over the most that was measured.
    /// They predict the same unless their tuners choose differently.
    pub fn ratio(&self) -> f64 {
        let ratios = self.counted().map(|counted| counted.predicted.ratio(counted.measured));
        ratios.fold(f64::INFINITY, f64::min)
    }

    /// The most bytes that any process took according to the driver, if the driver tells for all of
    /// them.
    fn driver(&self) -> Option<Bytes> {
        let taken: Option<Vec<Bytes>> = self.found.iter().map(|found| found.driver).collect();
        taken?.into_iter().max()
    }

    /// The largest prediction over the most bytes according to the driver.
    fn driver_ratio(&self) -> Option<f64> {
        let most = self.found.iter().map(|found| found.predicted).max()?;
        Some(most.ratio(self.driver()?))
    }

    fn is_exact(&self) -> bool {
        let (predicted, most) = (self.predicted(), self.most());
        predicted.max(most) - predicted.min(most) < ROUNDING
    }

    fn left(&self) -> impl Iterator<Item = process::Compared> {
        self.found.iter().filter_map(|found| found.left)
    }

    /// Whether the bytes in use after a step were predicted to the byte in every process that
    /// measured them.
    pub fn in_use_is_exact(&self) -> bool {
        self.left().count() > 0 && self.left().all(|left| left.predicted == left.measured)
    }

    /// Name of the case, with the card if the driver is blank.
    pub fn name(&self) -> String {
        match &self.card {
            Some(card) => format!("{} on {card}", self.case),
            None => self.case.to_string(),
        }
    }

    fn row(&self) -> Vec<String> {
        let mark = |mark: bool, text: &str| if mark { text.to_owned() } else { String::new() };
        let in_use = match self.left().find(|left| left.predicted != left.measured) {
            None => mark(self.in_use_is_exact(), "="),
            Some(left) => format!("{} not {}", left.predicted, left.measured),
        };
        let optional = |bytes: Option<Bytes>, none: &str| {
            bytes.map_or_else(|| none.to_owned(), |bytes| bytes.to_string())
        };
        vec![
            self.name(),
            mark(self.case.cliff, "near"),
            optional(self.before_tuning(), ""),
            self.predicted().to_string(),
            self.least().to_string(),
            self.most().to_string(),
            format!("{:.3}", self.ratio()),
            mark(self.is_exact(), "="),
            in_use,
            optional(self.driver(), "unknown"),
        ]
    }

    fn json(&self) -> Value {
        json!({
            "case": self.case.to_string(),
            "card": self.card,
            "near_a_cliff": self.case.cliff,
            "processes": self.found,
        })
    }
}

/// All cases of a run.
pub struct Comparison {
    pub target: String,
    /// At least one.
    pub cases: Vec<Compared>,
}

impl Comparison {
    /// Ratios of predicted to measured bytes, in ascending order.
    fn ratios(&self) -> Vec<f64> {
        let mut ratios: Vec<f64> = self.cases.iter().map(Compared::ratio).collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }

    /// Makes a table with one row per case.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(UTF8_FULL_CONDENSED);
        let columns = [
            "case",
            "cliff",
            "before tuning",
            "predicted",
            "least",
            "most",
            "ratio",
            "pages",
            "in use after a step",
            "most at the driver",
        ];
        table.set_header(columns);
        table.add_rows(self.cases.iter().map(Compared::row));
        for (at, column) in table.column_iter_mut().enumerate() {
            if matches!(at, 2..=6 | 9) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    /// All numbers, in bytes.
    pub fn json(&self) -> Value {
        let cases: Vec<Value> = self.cases.iter().map(Compared::json).collect();
        json!({ "target": self.target, "result": self.to_string(), "cases": cases })
    }
}

/// The line for scripts.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ratios = self.ratios();
        let exact = self.cases.iter().filter(|case| case.is_exact()).count();
        let middle = (ratios[(ratios.len() - 1) / 2] + ratios[ratios.len() / 2]) / 2.0;
        let (least, worst) = (ratios[0], ratios[ratios.len() - 1]);
        write!(f, "result: target={}", self.target)?;
        let cards: BTreeSet<_> = self.cases.iter().filter_map(|case| case.card.as_ref()).collect();
        if !cards.is_empty() {
            write!(f, " cards={}", cards.len())?;
        }
        write!(
            f,
            " cases={} median={middle:.3} worst={worst:.3} least={least:.3} exact_pages={exact}",
            ratios.len(),
        )?;
        let driver: Option<Vec<f64>> = self.cases.iter().map(Compared::driver_ratio).collect();
        let Some(driver) = driver else { return Ok(()) };
        let least = driver.iter().copied().fold(f64::INFINITY, f64::min);
        let worst = driver.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        write!(f, " driver_worst={worst:.3} driver_least={least:.3}")
    }
}
