//! `firebox cards`.

use firebox::dry::Card;
use firebox::plan::rates_of;
use serde_json::json;

use crate::table::table;

/// `firebox cards`.
pub fn cards(as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let cards = Card::all().iter().map(|card| {
            json!({
                "name": card.name(),
                "memory": card.memory(),
                "capability": card.capability().to_string(),
                "multiprocessors": card.multiprocessors(),
                "flops": rates_of(card).map(|rates| rates.flops),
                "bandwidth": rates_of(card).map(|rates| rates.bandwidth),
                "largest_buffer_on_burns_pools": card.largest_buffer(),
            })
        });
        let cards: serde_json::Value = cards.collect();
        println!("{}", serde_json::to_string_pretty(&cards)?);
        return Ok(());
    }
    let mut table =
        table(["card", "memory", "capability", "multiprocessors", "Tflop/s", "GB/s"], 1..6);
    for card in Card::all() {
        let rates = rates_of(card);
        let shown = |number: Option<f64>, digits: usize| {
            number.map_or("-".to_owned(), |number| format!("{number:.digits$}"))
        };
        table.add_row([
            card.name().to_owned(),
            card.memory().to_string(),
            card.capability().to_string(),
            card.multiprocessors().to_string(),
            shown(rates.map(|rates| rates.flops / 1e12), 1),
            shown(rates.map(|rates| rates.bandwidth / 1e9), 0),
        ]);
    }
    println!("{table}");
    Ok(())
}
